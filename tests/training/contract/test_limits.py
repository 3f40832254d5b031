"""Where a job ends, in every framework: limits of steps and time, streams without an end, and signals."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from training_bench import Bench

from manyhands.cli.parity import largest_difference
from manyhands.errors import BadSettings, CallbackFailed
from manyhands.training.callbacks.callback import Callback, Training
from manyhands.training.checkpoints import store
from manyhands.training.options import Checkpoints, Limits, Step
from manyhands.training.stopping import Stopped

STEPS = 4  # of an epoch: 64 samples in batches of 16


class Recorded:
    """A schedule that remembers what it was asked; at a step it may do something."""

    def __init__(self, at: int | None = None, do: Any = None) -> None:
        self.asked: list[float] = []
        self.at, self.do = at, do

    def __call__(self, at: float) -> float:
        self.asked.append(at)
        if len(self.asked) == self.at:
            self.do()
        return 1.0 - at / 100


@pytest.mark.neutral
def test_steps_end_a_job_and_more_of_them_go_on(bench: Bench) -> None:
    """Stopped within an epoch, and resumed: the weights are those of a job without a stop."""
    schedule, by_step = Recorded(), bench.mh.by_step(Recorded())
    limits, run = Limits(max_steps=6, evaluate_every="2 epochs"), bench.new_run()
    whole = bench.fit(epochs=None, schedule=schedule, limits=limits)
    assert schedule.asked == [step / 6 for step in range(6)]
    assert [(row["epoch"], row["step"], row["whole"]) for row in whole.rows] == [(1, 4, True), (2, 6, False)]
    assert [row["val_loss"] is None for row in whole.rows] == [True, False]
    assert (whole.steps, whole.rows[1]["samples"], whole.ended) == (6, 32, "max_steps")
    assert str(whole).endswith("; ended: max_steps")
    bench.fit(epochs=None, schedule=by_step, limits=Limits(max_steps=3), run=run)
    bench.fit(epochs=None, schedule=by_step, limits=Limits(max_steps=6), run=run, resume="auto")
    assert by_step.function.asked == [0, 1, 2, 3, 4, 5]
    plain = bench.fit(epochs=None, schedule=bench.mh.by_step(Recorded()), limits=limits)
    assert largest_difference(bench.weights(run), bench.weights(plain.run)) == 0


@pytest.mark.neutral
def test_the_end_of_a_job_has_a_row(bench: Bench) -> None:
    """A job that ends within an epoch is evaluated there; with larger limits it goes on after that row."""
    runs = [bench.new_run(), bench.new_run()]
    for run, ends in zip(runs, ([12], [6, 8, 12]), strict=True):  # 8: the end of an epoch that has no evaluation
        for steps in ends:
            limits = Limits(max_steps=steps, evaluate_every="3 epochs")
            result = bench.fit(
                epochs=None, loggers=[bench.mh.loggers.CSVLogger()], limits=limits, run=run, resume="auto"
            )
    assert largest_difference(*(bench.weights(run) for run in runs)) == 0
    rows = [(row["step"], row["samples"], row["val_loss"] is None) for row in result.rows]
    assert rows == [(4, 64, True), (6, 32, False), (8, 32, False), (12, 64, False)]
    table = [row.split(",")[1] for row in (run / "metrics.csv").read_text().splitlines()]
    assert table == ["step", "4", "6", "8", "12"]


class Evaluated(Callback):
    """Counts evaluations; the job is killed in one of them."""

    def __init__(self, killed_in: int | None = None) -> None:
        self.count, self.killed_in = 0, killed_in

    def on_evaluation(self, training: Training, metrics: dict[str, float]) -> None:
        self.count += 1
        if self.count == self.killed_in:
            raise RuntimeError("killed")


@pytest.mark.neutral
@pytest.mark.parametrize("limits", [{"epochs": 3}, {"epochs": None, "max_steps": 10}])
def test_the_end_is_evaluated_once(bench: Bench, limits: dict[str, Any]) -> None:
    """A finished run that is started again is not evaluated again; one that was killed in that evaluation is."""
    epochs, max_steps = limits["epochs"], limits.get("max_steps")
    how: dict[str, Any] = {"epochs": epochs, "limits": Limits(max_steps=max_steps, evaluate_every="2 epochs")}
    run = bench.new_run()
    with pytest.raises(CallbackFailed):
        bench.fit(run=run, callbacks=[Evaluated(killed_in=2)], **how)
    results = []
    for evaluations in (1, 0):
        seen = Evaluated()
        results.append(bench.fit(run=run, resume="auto", callbacks=[seen], **how))
        assert seen.count == evaluations
    first, again = results
    assert without_times(first.rows) == without_times(again.rows) == without_times(bench.fit(**how).rows)
    assert any("had already finished" in note for note in again.notes)


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.neutral
def test_time_ends_a_job_and_is_the_runs(bench: Bench) -> None:
    run, limits = bench.new_run(), Limits(max_time=0.001)
    first = bench.fit(epochs=None, limits=limits, run=run)
    assert (first.steps, first.ended) == (1, "max_time")
    again = bench.fit(epochs=None, limits=limits, run=run, resume="auto")
    assert (again.steps, again.ended, again.rows) == (1, "max_time", first.rows)
    assert any("had already finished" in note for note in again.notes)
    with pytest.raises(BadSettings, match="max_time alone does not say how many steps"):
        bench.fit(epochs=None, limits=limits, schedule=Recorded())


@pytest.mark.neutral
def test_a_stream_without_an_end(bench: Bench) -> None:
    """A generator is trained on for so many steps and evaluated as often as asked; cut anywhere, it goes on."""
    X, y = bench.images(64)

    def batches() -> Iterator[Any]:
        for number in itertools.count():
            rows = np.arange(number * 8, number * 8 + 8) % 64
            yield bench.arrays(X[rows], y[rows])

    data = (batches, bench.arrays(X, y))
    whole = bench.fit(epochs=None, data=data, limits=Limits(max_steps=7, evaluate_every="3 steps"))
    assert [(row["step"], row["samples"], row["val_loss"] is None) for row in whole.rows] == [
        (3, 24, False),
        (6, 24, False),
        (7, 8, False),
    ]
    run, every = bench.new_run(), Checkpoints(every=3)
    for steps in (3, 5, 7):
        limits = Limits(max_steps=steps, evaluate_every="3 steps")
        cut = bench.fit(epochs=None, data=data, limits=limits, run=run, resume="auto", checkpoints=every)
    assert largest_difference(bench.weights(run), bench.weights(whole.run)) == 0
    assert [row["step"] for row in cut.rows] == [3, 5, 6, 7]
    used_up = bench.fit(epochs=None, data=(itertools.islice(batches(), 2), None), limits=Limits(max_steps=7))
    assert (used_up.steps, used_up.ended) == (2, "end of the data")
    assert any("the data ended after 2 steps" in note for note in used_up.notes)


@pytest.mark.neutral
def test_few_batches(bench: Bench) -> None:
    """limit_batches takes other samples in every epoch, overfit_batches the same; validation has its own limit."""
    limited = bench.fit(limits=Limits(limit_batches=2, limit_val_batches=1), schedule=(schedule := Recorded()))
    assert schedule.asked == [0, 0.25, 0.5, 0.75]
    assert [(row["step"], row["samples"]) for row in limited.rows] == [(2, 32), (4, 32)]
    seen, model = {"seen": lambda outputs, _: float(len(outputs))}, bench.recipes.model("mlp", 0)
    half = bench.fit(epochs=1, limits=Limits(limit_batches=0.5, limit_val_batches=0.5), metrics=seen)
    assert (half.rows[0]["samples"], half.rows[0]["val_seen"]) == (32, 16)
    # A limit of the training is none of evaluate; batches are those of the data, where they have some.
    trainer = bench.mh.Trainer(1, metrics=seen, limits=Limits(limit_val_batches=1), quiet=True, **bench.on(1))
    validation = bench.data(tested=23, batch_size=10)[1]
    found = [trainer.evaluate(model, validation, limit_batches=limit)["seen"] for limit in (None, 0.7)]
    assert found == [23, 20]
    over = bench.fit(epochs=40, limits=Limits(overfit_batches=1))
    assert over.rows[-1]["samples"] == 16
    assert over.rows[-1]["train_acc"] == 1.0


@pytest.mark.parametrize(
    "name",
    ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.neutral), pytest.param("SIGUSR1", marks=pytest.mark.long)],
)
def test_a_signal_ends_a_job_with_a_checkpoint(bench: Bench, name: str) -> None:
    """Once, after the step that it came in; the job goes on to the same weights, and nobody's handlers are changed."""
    number = signal.Signals[name]
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    run = bench.new_run()
    schedule = Recorded(STEPS + 1, lambda: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt if name == "SIGINT" else SystemExit) as caught:
        bench.fit(schedule=bench.mh.by_step(schedule), run=run)
    assert isinstance(caught.value, Stopped)
    assert {one: signal.getsignal(one) for one in handlers} == handlers
    assert (caught.value.result.signal, caught.value.result.steps) == (name, STEPS + 1)
    assert name == "SIGINT" or caught.value.code == 128 + number
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["step-00000004", "step-00000005"]
    seconds = store.load(run / "checkpoints").state["seconds_of_row"]
    resumed = bench.fit(schedule=bench.mh.by_step(Recorded()), run=run, resume="auto")
    assert resumed.rows[1]["whole"]
    assert resumed.rows[1]["seconds"] > seconds > 0
    whole = bench.fit(schedule=bench.mh.by_step(Recorded()))
    assert largest_difference(bench.weights(run), bench.weights(whole.run)) == 0
    metrics = [[(row["train_loss"], row["val_loss"]) for row in result.rows] for result in (resumed, whole)]
    assert metrics[0] == metrics[1]


@pytest.mark.neutral
def test_a_signal_within_the_last_evaluation(bench: Bench) -> None:
    """Validation data may have no end: a job at its limit is stopped, too, and evaluates when it goes on."""
    train, validation = bench.data()
    how: dict[str, Any] = {"epochs": None, "limits": Limits(max_steps=3), "run": bench.new_run()}

    def endless() -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return itertools.chain.from_iterable(itertools.repeat(list(validation)))

    with pytest.raises(Stopped) as caught:
        bench.fit(data=(train, endless), **how)
    assert (caught.value.result.steps, caught.value.result.rows) == (3, [])
    assert bench.fit(data=(train, validation), resume="auto", **how).rows[-1]["val_loss"] is not None


@pytest.mark.neutral
def test_no_handlers_outside_the_main_thread(bench: Bench) -> None:
    seen: list[Any] = []
    look = Recorded(1, lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    thread = threading.Thread(target=lambda: bench.fit(epochs=1, schedule=look))
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_micro_batches_of_a_size(bench: Bench) -> None:
    """No device processes more samples at once, on uneven shards too; the update is that of the whole batch."""
    if bench.framework != "mxnet":  # it refuses them
        whole = bench.fit(epochs=1)
        parts = bench.fit(2, epochs=1, step=Step(micro_batch_size=3))
        assert largest_difference(bench.weights(parts.run), bench.weights(whole.run)) < 1e-5
    assert Step(micro_batch_size=5).in_micro_batches(16, 1).accumulate == 4
    assert Step(micro_batch_size=2, shares=[3, 1]).in_micro_batches(16, 2).accumulate == 6


def test_a_schedule_of_the_frameworks_own_is_resumed(bench: Bench) -> None:
    if bench.framework == "torch":
        pytest.skip("tests/training/torch/test_schedulers.py")
    data, run = bench.data(samples=64), bench.new_run()
    whole = bench.fit(optimizer=bench.own.scheduled(), data=data)
    for steps in (3, 8):
        how: dict[str, Any] = {"limits": Limits(max_steps=steps), "run": run, "resume": "auto"}
        bench.fit(optimizer=bench.own.scheduled(), data=data, **how)
    assert largest_difference(bench.weights(run), bench.weights(whole.run)) == 0
    with pytest.raises(BadSettings, match=r"PerStep\(\.\.\.\) is for PyTorch's schedulers"):
        bench.mh.Trainer(schedule=bench.mh.PerStep(lambda optimizer: None))
