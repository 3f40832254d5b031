"""Callbacks mean the same in every framework: their moments, their metrics, how they stop a training and continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load
from support import StopAt, Stopped, same_rate
from training_bench import Bench

from manyhands.cli.parity import largest_difference
from manyhands.errors import BadSettings, CallbackFailed, WorkerFailed
from manyhands.training.callbacks.callback import Callback, Training
from manyhands.training.checkpoints import store
from manyhands.training.options import Checkpoints, Limits

# 64 samples in batches of 16: four steps an epoch.


class Diary(Callback):
    """Writes down every moment."""

    def __init__(self, every: int | None = None) -> None:
        self.every = every
        self.moments: list[str] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.kept = 0

    def on_fit_start(self, training: Training) -> None:
        self.moments.append(f"fit start {training.step}")

    def on_epoch_start(self, training: Training) -> None:
        self.moments.append(f"epoch start {training.epoch}")

    def on_steps(self, training: Training, metrics: dict[str, float]) -> None:
        self.metrics[training.step] = metrics

    def on_evaluation(self, training: Training, metrics: dict[str, float]) -> None:
        self.moments.append(f"evaluation {training.step} {sorted(metrics)}")

    def on_epoch_end(self, training: Training, row: dict[str, Any]) -> None:
        self.moments.append(f"epoch end {row['epoch']}")
        assert training.rows[-1] is row
        self.kept += 1

    def on_checkpoint(self, training: Training, path: Path) -> None:
        self.moments.append(f"checkpoint {path.name}")

    def on_fit_end(self, training: Training) -> None:
        self.moments.append(f"fit end {training.error!r}")

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


@pytest.mark.neutral
def test_moments_figures_and_state(bench: Bench) -> None:
    diary = Diary(every=3)
    sgd: dict[str, Any] = {"optimizer": None, "lr": 0.05}
    data = bench.data(samples=50)  # the last batch is short
    result = bench.fit(2, epochs=2, data=data, callbacks=[diary, bench.mh.LearningRateMonitor()], **sgd)
    names = "['val_acc', 'val_loss']"
    assert diary.moments == [
        "fit start 0",
        *("epoch start 1", f"evaluation 4 {names}", "epoch end 1", "checkpoint step-00000004"),
        *("epoch start 2", f"evaluation 8 {names}", "epoch end 2", "checkpoint step-00000008"),
        "fit end None",
    ]
    # The means of steps 1-3 and 4-6 have the samples 48 and 2 + 32; those of 7 and 8 are the second epoch's rest.
    assert sorted(diary.metrics) == [3, 6]
    first, second = diary.metrics[3], diary.metrics[6]
    last_of_epoch = (result.rows[0]["train_loss"] * 50 - first["train_loss"] * 48) / 2
    assert 0 < last_of_epoch < 10
    assert 0 < second["train_loss"] < 10
    assert 0 <= second["train_acc"] <= 1
    assert result.rows[0]["lr"] == pytest.approx(0.05)
    kept = json.loads((Path(result.run) / "checkpoints" / "step-00000008" / "state.json").read_text())
    assert kept["state"]["callbacks"]["states"]["Diary"] == {"kept": 2}


@pytest.mark.neutral
def test_a_resumed_job_calls_as_one_that_was_not_stopped(bench: Bench) -> None:
    whole, before, after = Diary(every=3), Diary(every=3), Diary(every=3)
    how: dict[str, Any] = {"epochs": 2, "checkpoints": Checkpoints(every=2)}
    bench.fit(callbacks=[whole], schedule=same_rate, **how)
    run = bench.new_run()
    with pytest.raises((Stopped, WorkerFailed)):
        bench.fit(callbacks=[before], run=run, schedule=StopAt(5), **how)
    assert before.moments[-1].startswith("fit end Stopped")
    bench.fit(callbacks=[after], run=run, resume="auto", schedule=same_rate, **how)
    assert after.moments[0] == "fit start 4"
    assert {**before.metrics, **after.metrics} == whole.metrics
    assert after.kept == whole.kept == 2


class StopIn(Callback):
    def __init__(self, epoch: int, error: Exception | None = None) -> None:
        self.epoch, self.error = epoch, error

    def on_evaluation(self, training: Training, metrics: dict[str, float]) -> None:
        if training.epoch == self.epoch:
            if self.error is not None:
                raise self.error
            training.stop("it is enough")


def test_a_callback_stops_all_devices(bench: Bench) -> None:
    result = bench.fit(2, epochs=5, callbacks=[StopIn(2)], checkpoints=Checkpoints(every=3))
    assert [row["epoch"] for row in result.rows] == [1, 2]
    assert (result.stopped, result.ended) == ("it is enough", "stopped by callback: it is enough")
    assert (Path(result.run) / "checkpoints" / "step-00000008").is_dir()


class StopAtStep(Callback):
    every = 1

    def on_steps(self, training: Training, metrics: dict[str, float]) -> None:
        if training.step == 2:
            training.stop("two are enough")


@pytest.mark.neutral
@pytest.mark.parametrize("devices", [1, 2])
def test_a_callback_stops_between_steps(bench: Bench, devices: int) -> None:
    """The job ends soon after, on all devices after the same step, with a checkpoint.

    Within an epoch it ends with an evaluation; at the end of one, which may be sooner, with one where it is due.
    """
    result = bench.fit(devices, epochs=2000, limits=Limits(evaluate_every="2000 epochs"), callbacks=[StopAtStep()])
    assert result.ended == "stopped by callback: two are enough"
    assert 2 <= result.steps < 8000
    assert result.rows[-1]["step"] == result.steps
    if result.steps % 4:
        assert result.rows[-1]["val_loss"] is not None
    assert (Path(result.run) / "checkpoints" / f"step-{result.steps:08d}").is_dir()


@pytest.mark.neutral
def test_an_error_names_callback_and_moment(bench: Bench) -> None:
    with pytest.raises(CallbackFailed, match=r"StopIn failed in on_evaluation \(epoch 1, step 4\): KeyError") as caught:
        bench.fit(2, callbacks=[StopIn(1, KeyError("nothing"))])
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.neutral
def test_early_stopping_and_best_checkpoints(bench: Bench) -> None:
    """No improvement is enough: the best is that of the first epoch. A resumed job knows that it was stopped."""
    mh, run = bench.mh, bench.new_run()
    how: dict[str, Any] = {"epochs": 6, "run": run}
    stopping, best = mh.EarlyStopping("val_loss", patience=2, min_delta=100), mh.BestCheckpoint("val_loss", "max")
    result = bench.fit(callbacks=[stopping, best], **how)
    assert len(result.rows) == 3
    assert "val_loss has not improved for 2 evaluations" in result.stopped
    assert result.ended == f"early stopping: {result.stopped}"
    losses = [row["val_loss"] for row in result.rows]
    assert best.best_value == pytest.approx(max(losses))
    assert best.best_path == run / "best" / f"step-{4 * (1 + losses.index(max(losses))):08d}"
    assert list((run / "best").iterdir()) == [best.best_path]
    mh.load_weights(bench.recipes.model("mlp", 1), best.best_path)
    again = bench.fit(callbacks=[mh.EarlyStopping("val_loss", patience=2, min_delta=100)], resume="auto", **how)
    assert [row["val_loss"] for row in again.rows] == losses
    assert "has not improved" in again.stopped
    epochs = losses.index(max(losses)) + 2
    further = bench.fit(epochs=epochs, run=run, resume=best.best_path)
    assert [row["val_loss"] for row in further.rows][: epochs - 1] == losses[: epochs - 1]


class Look(Callback):
    def on_model(self, training: Training, model: Any) -> None: ...


@pytest.mark.neutral
def test_only_pytorch_lends_its_model(bench: Bench) -> None:
    run = bench.new_run()
    if bench.framework == "torch":
        bench.fit(callbacks=[Look()], run=run)
        return
    with pytest.raises(
        BadSettings, match=r"on_model\(training, model\), which PyTorch's trainer alone calls.*load_weights"
    ):
        bench.fit(callbacks=[Look()], run=run)
    assert not run.exists()


def test_an_accuracy_that_is_not_there(bench: Bench) -> None:
    """Known after the first evaluation: the targets are no classes."""
    mh, random = bench.mh, np.random.default_rng(0)
    X, y = bench.arrays(random.normal(size=(8, 4)).astype(np.float32), random.normal(size=(8, 3)).astype(np.float32))
    trainer = mh.Trainer(1, callbacks=[mh.EarlyStopping("val_acc")], loss="mse", quiet=True, **bench.on(1))
    with pytest.raises(BadSettings, match=r"'val_acc'\): there is no metric 'val_acc'\. There are val_loss"):
        trainer.fit(bench.own.normalising(), (X, y), (X, y))


@pytest.mark.neutral
def test_unknown_monitors_list_what_there_is(bench: Bench) -> None:
    """Before the first step, and before a run's folder is made."""
    mh, run = bench.mh, bench.new_run()
    with pytest.raises(BadSettings, match=r"no metric 'val_f2'\. There are train_acc, train_loss, val_acc, val_loss"):
        bench.fit(callbacks=[mh.EarlyStopping("val_f2")], run=run)
    with pytest.raises(BadSettings, match=r"no metric 'loss'.*train_acc, train_loss, val_acc, val_f1, val_loss"):
        bench.fit(callbacks=[mh.BestCheckpoint("loss")], metrics={"f1": len}, run=run)
    with pytest.raises(BadSettings, match=r"no metric 'val_loss', because there are no validation data"):
        bench.fit(callbacks=[mh.EarlyStopping("val_loss")], data=bench.data()[0], run=run)
    assert not run.exists()
    with pytest.raises(BadSettings, match=r"BestCheckpoint writes into the run's folder.*give run="):
        bench.mh.Trainer(callbacks=[bench.mh.BestCheckpoint("val_loss")])
    with pytest.raises(BadSettings, match=r"this is the class; make one, EMA"):
        bench.mh.Trainer(callbacks=[bench.mh.EMA])


@pytest.fixture
def averaging(bench: Bench) -> Bench:
    """A framework whose trainer keeps an average of the weights."""
    if bench.framework == "mxnet":
        with pytest.raises(BadSettings, match="EMA: MXNet's trainer keeps no average"):
            bench.fit(callbacks=[bench.mh.EMA(0.5)])
        pytest.skip("MXNet's trainer refuses it")
    return bench


def test_an_average_of_the_weights(averaging: Bench) -> None:
    """Exact on two devices, continued to the bit, used for evaluation, and what load_weights gives."""
    bench = averaging
    mh, how = bench.mh, {"epochs": 2, "checkpoints": Checkpoints(every=2), "data": bench.data(samples=64)}

    def trained(devices: int, run: Path, **options: Any) -> Any:
        return bench.fit(devices, run=run, callbacks=[mh.EMA(0.5)], **{**how, **options})

    one, two, resumed, plain = (bench.new_run() for _ in range(4))
    result = trained(1, one, schedule=same_rate)
    with pytest.raises((Stopped, WorkerFailed)):
        trained(1, resumed, schedule=StopAt(5))
    again = trained(1, resumed, resume="auto", schedule=same_rate)
    trained(2, two)
    without = bench.fit(run=plain, **how)
    averages = [average(run) for run in (one, two, resumed)]
    assert largest_difference(averages[0], averages[1]) < 1e-5
    assert largest_difference(averages[0], averages[2]) == 0
    assert [row["val_loss"] for row in again.rows] == [row["val_loss"] for row in result.rows]
    assert [row["val_loss"] for row in without.rows] != [row["val_loss"] for row in result.rows]
    assert [row["train_loss"] for row in without.rows] == [row["train_loss"] for row in result.rows]
    # The weights go their way as without an average; each of them is the mean of the average and what it was before.
    weights = [load(store.load(one / "checkpoints" / f"step-{step:08d}").blobs["model"]) for step in (6, 8)]
    assert largest_difference(weights[1], bench.weights(plain)) == 0
    assert 1e-5 < largest_difference(weights[1], averages[0]) < largest_difference(*weights) * 2


def average(run: Path) -> dict[str, Any]:
    return dict(load(store.load(run / "checkpoints").blobs["average"]))


def test_an_average_of_running_statistics(averaging: Bench) -> None:
    """Each device of two may have statistics of its own; the average is of those that count, and is continued."""
    bench = averaging
    run, random = bench.new_run(), np.random.default_rng(0)
    data = bench.arrays(random.normal(size=(18, 4)).astype(np.float32), random.integers(3, size=18))
    how: Any = {"callbacks": [bench.mh.EMA(0.5, use_buffers=True)], "loss": "cross_entropy", "quiet": True}
    how |= {"run": run, "checkpoints": Checkpoints(every=1), "batch_size": 6, "lr": 0.1, **bench.on(2)}
    bench.mh.Trainer(1, limits=Limits(max_steps=2), **how).fit(bench.own.normalising(), data)
    bench.mh.Trainer(1, resume="auto", **how).fit(bench.own.normalising(), data)
    found = [store.load(run / "checkpoints" / f"step-{step:08d}").blobs for step in (1, 2, 3)]
    weights, averages = ([dict(load(blobs[name])) for blobs in found] for name in ("model", "average"))
    moving = [name for name, value in weights[2].items() if value.dtype.kind == "f"]
    assert any("mean" in name for name in moving)
    for step in (1, 2):
        for name in moving:
            expected = (averages[step - 1][name] + weights[step][name]) / 2
            np.testing.assert_allclose(averages[step][name], expected, rtol=1e-5, atol=1e-7, err_msg=name)
