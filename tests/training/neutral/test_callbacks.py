"""What callbacks do with the events of a training, without one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import BadSettings, CallbackFailed
from manyhands.training.callbacks.builtin import EMA, BestCheckpoint, EarlyStopping
from manyhands.training.callbacks.callback import Averaging, Callback, Training, check_callbacks, plan_of
from manyhands.training.callbacks.display import Progress
from manyhands.training.callbacks.events import Dispatcher
from manyhands.training.checkpoints import store
from manyhands.training.options import Settings


def begun(
    callbacks: list[Callback], run: Path | None = None, step: int = 0, states: Any = None, quiet: bool = True
) -> tuple[Dispatcher, dict[str, Any]]:
    """A training that has begun, and the answer to that."""
    dispatcher = Dispatcher(callbacks, Settings(max_epochs=9), run, quiet=quiet, first=True)
    place = {"epoch": 1, "step": step, "rows": [], "batches": 4, "states": states, "resumed": states is not None}
    answer = dispatcher.event({"kind": "begin", "asks": True, **place})
    assert answer is not None
    return dispatcher, answer


def evaluate(dispatcher: Dispatcher, step: int, **metrics: float) -> dict[str, Any]:
    answer = dispatcher.event({"kind": "evaluation", "epoch": step, "step": step, "metrics": metrics, "asks": True})
    assert answer is not None
    return answer


class Means(Callback):
    def __init__(self, every: int) -> None:
        self.every, self.state_key, self.losses = every, str(every), list[float]()

    def on_steps(self, training: Training, metrics: dict[str, float]) -> None:
        self.losses.append(metrics["train_loss"])


def test_means_over_the_steps_since_the_last_ones() -> None:
    """Two callbacks, after every 2 and every 3 steps; an epoch has 4 steps of one sample, with losses 1 to 8."""
    callbacks: list[Any] = [Means(2), Means(3)]
    dispatcher, _ = begun(callbacks)
    total = 0
    for step in range(1, 9):
        total += step
        place = {"epoch": 1, "step": step, "sums": [total, 0.0, (step - 1) % 4 + 1, False, {}]}
        dispatcher.event({"kind": "steps", "rates": {}, **place})
        if step % 4 == 0:
            dispatcher.event({"kind": "epoch", "row": {}, **place})
            dispatcher, _ = begun(callbacks, step=step, states=dispatcher.event({"kind": "states", "asks": True}))
            total = 0
    assert [callback.losses for callback in callbacks] == [[1.5, 3.5, 5.5, 7.5], [2.0, 5.0]]


@pytest.mark.parametrize(
    ("mode", "values", "stopped_at"),
    [
        ("min", [3, 2, 2, 2, 1], 4),
        ("max", [3, 2, 4, 4, 3.5, 9], 5),
        (None, [3, math.nan, math.nan, 1], 3),
        (None, [math.nan, math.nan, 1], 2),
    ],
)
def test_early_stopping(mode: Any, values: list[float], stopped_at: int) -> None:
    dispatcher, _ = begun([EarlyStopping("val_x", patience=2, mode=mode)])
    stops = [evaluate(dispatcher, step, val_x=value)["stop"] for step, value in enumerate(values, start=1)]
    assert [stop is not None for stop in stops] == [step >= stopped_at for step in range(1, len(values) + 1)]


def test_early_stopping_continues_where_it_was_and_with_more_patience() -> None:
    dispatcher, _ = begun([EarlyStopping("val_acc", patience=2)])
    evaluate(dispatcher, 1, val_acc=0.5)
    evaluate(dispatcher, 2, val_acc=0.4)
    states = dispatcher.event({"kind": "states", "asks": True})
    dispatcher, _ = begun([EarlyStopping("val_acc", patience=2)], states=states)
    assert "the best was 0.5 in epoch 1" in evaluate(dispatcher, 3, val_acc=0.45)["stop"]
    states = dispatcher.event({"kind": "states", "asks": True})
    _, answer = begun([EarlyStopping("val_acc", patience=2)], states=states)
    assert answer["stop"] is not None, "it was stopped already"
    dispatcher, answer = begun([EarlyStopping("val_acc", patience=4)], states=states)
    assert answer["stop"] is None
    assert evaluate(dispatcher, 4, val_acc=0.6)["stop"] is None


class Job:
    """Evaluates and saves as a loop does; may be killed between the best checkpoint and the regular one."""

    def __init__(self, run: Path, states: Any = None, step: int = 0, **options: Any) -> None:
        self.run, self.best = run, BestCheckpoint("val_loss", save_top_k=2, **options)
        for folder in (run / "best", run / "checkpoints"):
            store.drop_after(folder, step)
        self.dispatcher, _ = begun([self.best], run, step, states)

    def step(self, step: int, loss: float, *, killed: bool = False) -> None:
        wanted = evaluate(self.dispatcher, step, val_loss=loss)["save"]
        states = self.dispatcher.event({"kind": "states", "asks": True})
        for name in [*wanted, *([] if killed else ["checkpoints"])]:
            keep = 3 if name == "checkpoints" else None
            path = store.save(self.run / name, step, {"callbacks": states}, {}, keep=keep)
            self.dispatcher.event({"kind": "checkpoint", "epoch": 1, "step": step, "path": str(path)})

    @property
    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.run / "best").iterdir())


LOSSES = [5.0, 3.0, 4.0, 2.0, math.nan, 2.0, 1.0]


@pytest.mark.parametrize("killed_at", range(1, len(LOSSES) + 1))
def test_best_checkpoints_survive_a_kill(tmp_path: Path, killed_at: int) -> None:
    whole = Job(tmp_path / "whole")
    for step, loss in enumerate(LOSSES, start=1):
        whole.step(step, loss)
    assert whole.kept == ["step-00000004", "step-00000007"]
    assert whole.best.best_path == tmp_path / "whole" / "best" / "step-00000007"
    run = tmp_path / "killed"
    job = Job(run)
    for step in range(1, killed_at):
        job.step(step, LOSSES[step - 1])
    job.step(killed_at, LOSSES[killed_at - 1], killed=True)
    newest = store.load(run / "checkpoints") if killed_at > 1 else None
    job = Job(run, newest.state["callbacks"] if newest else None, newest.step if newest else 0)
    for step in range(newest.step + 1 if newest else 1, len(LOSSES) + 1):
        job.step(step, LOSSES[step - 1])
    assert job.kept == whole.kept
    assert {path.name: value for path, value in job.best.best.items()} == {"step-00000007": 1.0, "step-00000004": 2.0}


class Shows(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.epochs: list[int] = []

    def on_note(self, training: Training, text: str) -> None:
        self.notes.append(text)

    def on_epoch_end(self, training: Training, row: dict[str, Any]) -> None:
        self.epochs.append(row["epoch"])


def test_progress_can_be_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "epoch": 1,
        "step": 4,
        "train_loss": 0.5,
        "train_acc": None,
        "val_loss": None,
        "val_acc": None,
        "seconds": 1.0,
    }
    event = {"kind": "epoch", "epoch": 1, "step": 4, "row": row, "sums": [2.0, 0.0, 4.0, False, {}]}
    for quiet, given in ((False, False), (False, True), (True, True)):
        shows = Shows()
        with begun([shows] if given else [], quiet=quiet)[0] as dispatcher:
            dispatcher.event({"kind": "note", "text": "going on"})
            dispatcher.event(event)
        assert shows.notes == (["going on"] if given and not quiet else [])
        assert shows.epochs == ([1] if given and not quiet else [])
        assert ("epoch 1" in capsys.readouterr().err) == (not given and not quiet)


class Breaks(Callback):
    def __init__(self, state: Any = None) -> None:
        self.state = state

    def on_fit_end(self, training: Training) -> None:
        raise ValueError("at the end")

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}


def test_an_error_at_the_end_does_not_hide_the_one_that_ended_the_training() -> None:
    dispatcher = begun([Breaks()])[0]
    with pytest.raises(CallbackFailed, match=r"Breaks failed in on_fit_end .*ValueError: at the end"):
        dispatcher.__exit__(None, None, None)
    with pytest.raises(KeyError) as caught, begun([Breaks()])[0]:
        raise KeyError
    assert "Breaks failed in on_fit_end" in caught.value.__notes__[0]


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(BadSettings, match=r"two of them write to one folder"):
        plan_of([BestCheckpoint("val_loss"), BestCheckpoint("val_acc")], has_run=True)
    with pytest.raises(BadSettings, match=r"2 callbacks average the weights.*give one EMA"):
        plan_of([EMA(0.9), EMA(0.99)], has_run=False)
    with pytest.raises(
        BadSettings, match=r"callbacks=\[5\]: an int is not a Callback; derive your class from mh.Callback"
    ):
        check_callbacks("callbacks", [5], Callback)
    with pytest.raises(BadSettings, match=r"EMA\(decay=1\): give a number between 0 and 1"):
        EMA(1)
    with pytest.raises(BadSettings, match=r"EMA\(use_buffers=1\): give True or False"):
        EMA(use_buffers=1)  # type: ignore[arg-type]
    with pytest.raises(BadSettings, match=r"the newest checkpoints are there"):
        BestCheckpoint("val_loss", folder="checkpoints")
    with pytest.raises(BadSettings, match=r"mode='up'"):
        EarlyStopping("val_loss", mode="up")  # type: ignore[arg-type]
    assert plan_of([EMA(0.5)], has_run=False).average == Averaging(0.5, buffers=False)


def test_another_figure_begins_anew(tmp_path: Path) -> None:
    """A checkpoint's best of one metric says nothing about another."""
    before = EarlyStopping("val_loss", patience=1)
    before.best, before.best_epoch, before.waited = 0.5, 1, 1
    after = EarlyStopping("val_acc", patience=1, mode="max")
    after.load_state_dict(before.state_dict())
    assert (after.best, after.waited) == (None, 0)
    best = BestCheckpoint("val_loss")
    best._best = [(0.5, 4)]
    other = BestCheckpoint("train_loss", mode="max")
    other.load_state_dict(best.state_dict())
    assert other._best == []


class Remembers(Callback):
    def __init__(self, key: str | None = None) -> None:
        self.state_key, self.number = key, 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def test_states_find_their_callbacks_in_any_order() -> None:
    """By class and key, then by their order; what nobody takes up is a note."""
    loss, accuracy, plain, other = EarlyStopping("val_loss"), EarlyStopping("val_acc"), Remembers(), Remembers("b")
    loss.waited, accuracy.waited, plain.number, other.number = 1, 2, 3, 4
    dispatcher = Dispatcher([loss, accuracy, plain, other], Settings(max_epochs=9), None, quiet=True, first=True)
    states = dispatcher.event({"kind": "states", "asks": True})
    loss, accuracy, plain, other = EarlyStopping("val_loss"), EarlyStopping("val_acc"), Remembers(), Remembers("b")
    begun([Remembers("a"), other, accuracy, loss, plain], states=states)
    assert [loss.waited, accuracy.waited, plain.number, other.number] == [1, 2, 3, 4]
    dispatcher, _ = begun([EarlyStopping("val_f1"), plain, other], states=states)
    assert dispatcher.notes == [
        "the checkpoint has the state of EarlyStopping(val_loss), EarlyStopping(val_acc), which this job does not have"
    ]


def test_a_moment_of_another_library_is_refused() -> None:
    class Lightning(Callback):
        def on_train_epoch_end(self, *_: Any) -> None: ...

    class Own(Callback):
        def on_epoch_end(self, *_: Any) -> None: ...

    with pytest.raises(BadSettings, match=r"on_train_epoch_end is not an event.*Did you mean on_epoch_end\?"):
        check_callbacks("callbacks", [Lightning()], Callback)
    assert len(check_callbacks("callbacks", [Own(), EarlyStopping("val_loss")], Callback)) == 2


def test_figures_of_steps_need_a_number_of_steps() -> None:
    class Steps(Callback):
        def on_steps(self, *_: Any) -> None: ...

    class Chosen(Steps):
        def __init__(self, every: int | None = None) -> None:
            self.every = every

    with pytest.raises(BadSettings, match=r"Steps\.on_steps would never be called: .* every = 10"):
        check_callbacks("callbacks", [Steps()], Callback)
    assert len(check_callbacks("callbacks", [Chosen(), Chosen(5)], Callback)) == 2


def test_a_callback_that_asks_for_the_model_is_told_why_not() -> None:
    with pytest.raises(AttributeError, match=r"it may be in another process.* on_model\(training, model\)"):
        _ = Training(3).model
    assert not hasattr(Training(3), "nothing_like_it")


@pytest.mark.parametrize("callback", [EarlyStopping("val_f1"), BestCheckpoint("val_f1")])
def test_a_figure_of_several_values_cannot_be_followed(callback: Any, tmp_path: Path) -> None:
    training = Training(3, tmp_path)
    callback.on_fit_start(training)
    with pytest.raises(
        BadSettings, match=r"\('val_f1'\): 'val_f1' has several values \(\[0.5, 1.0\]\).*return one number"
    ):
        callback.on_evaluation(training, {"val_loss": 1.0, "val_f1": [0.5, 1.0]})
