"""``Callback``: the user's code that is called at certain events of a training. ``docs/training.md`` has an example.

Callbacks run in the process that called ``fit``, also where the training runs in worker processes; under a launcher
(torchrun) in the first rank's. They see metrics over all devices, and the model in :meth:`Callback.on_model` alone: it
may be in another process. No step waits for them. Metrics of steps come when the device has sent them, some steps later
than they were made.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from manyhands.errors import BadSettings, type_in_words
from manyhands.training.options import check_count
from manyhands.training.result import Result

Values = dict[str, float]
Row = dict[str, Any]
# What of a row is no metric of the model.
NO_METRICS = ("epoch", "step", "samples", "seconds", "whole")


class Training:
    """A training as its callbacks see it."""

    def __init__(self, max_epochs: int | None, run: Path | None = None) -> None:
        # Where the training ends; None: not there.
        self.max_epochs = max_epochs
        self.max_steps: int | None = None
        # The run's folder; None: nothing is written.
        self.run = run
        # The epoch that is trained, from 1 on; and the steps that were made when the metrics of this moment were.
        self.epoch = 0
        self.step = 0
        # Batches of an epoch, where that is known; whether the job continues from a checkpoint; has validation data.
        self.batches: int | None = None
        self.resumed = self.validates = False
        # The rows of all epochs so far, as in ``result.rows``.
        self.rows: list[Row] = []
        # At the end: what came of it, or the error that ended it.
        self.result: Result | None = None
        self.error: BaseException | None = None
        self.stopped: str | None = None
        self.stopped_by = ""
        self.wanted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "module", "optimizer", "trainer"):
            raise AttributeError(
                f"training has no {name}: it may be in another process. Override on_model(training, model), which gets "
                "the model after each epoch; what has to happen in each step belongs into training_step"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def stop(self, reason: str, by: str = "stopped by callback") -> None:
        """End the training; ``result.stopped`` will be the reason, and ``result.ended`` "stopped by callback: reason".

        From ``on_evaluation``, ``on_epoch_end`` and ``on_model`` it ends there. From any other moment it ends as soon
        as all devices know it: one process after the next step, several about a second later, all of them after the
        same step. A training that ends within an epoch ends with an evaluation; at the end of an epoch, if one was due
        there.
        """
        if self.stopped is None:
            self.stopped, self.stopped_by = str(reason), by

    def save(self, folder: str) -> None:
        """Write a checkpoint into a folder of the run; for ``on_evaluation``, ``on_epoch_end`` and ``on_model``."""
        if folder not in self.wanted:
            self.wanted.append(folder)


@dataclass(frozen=True, slots=True)
class Averaging:
    """The settings of a moving average of the weights: see ``EMA``."""

    decay: float
    buffers: bool = False  # whether running statistics are averaged, too


class Callback:
    """Code that is called at certain events of a training: override the methods that you need.

    An exception in one of them ends the training: ``CallbackFailed`` names the callback and the event.
    """

    # Steps between two calls of on_steps; None: it is not called.
    every: int | None = None
    # The metric that it follows, as "val_loss": ``fit`` refuses one that there will not be. None: it follows none.
    monitored: str | None = None
    # Tells callbacks of one class apart in a checkpoint: each gets its state again, in whatever order they are given.
    state_key: str | None = None

    # What the callbacks that come with manyhands want of a training besides: checkpoints in this
    # folder of the run, the learning rates, an average of the weights.
    saves_to: str | None = None
    wants_rates: ClassVar[bool] = False
    averaging: Averaging | None = None

    def on_fit_start(self, training: Training) -> None:
        """The training begins; a resumed one has its state already."""

    def on_epoch_start(self, training: Training) -> None:
        """``training.epoch`` begins, or continues after a resume."""

    def on_progress(self, training: Training, metrics: Values) -> None:
        """A few times a second: how far the training is, and the newest metrics of the epoch that have arrived.

        ``batch`` and ``samples`` count this epoch's; ``loss`` and ``accuracy`` are those of the first process alone.
        """

    def on_steps(self, training: Training, metrics: Values) -> None:
        """Every ``every`` steps, late: means over the steps since the last call; ``training.step`` is the last of them.

        ``train_loss``; ``train_acc`` where classes are predicted; ``lr`` where ``LearningRateMonitor`` is a callback.
        """

    def on_evaluation(self, training: Training, metrics: Values) -> None:
        """The model was evaluated on the validation data: ``val_loss``, ``val_acc`` and your own metrics."""

    def on_epoch_end(self, training: Training, row: Row) -> None:
        """An epoch is over; ``row`` is its row in ``result.rows``."""

    def on_model(self, training: Training, model: Any) -> None:
        """After each whole epoch, behind ``on_epoch_end``: the model, to look at or to change (PyTorch).

        All devices get what you change: values that you write into weights and buffers, ``requires_grad``, and numbers,
        strings and flags among the attributes of modules. Meanwhile the model is in evaluation mode. With several
        devices the weights travel to this process and back, so override it only if you need the model.
        """

    def on_checkpoint(self, training: Training, path: Path) -> None:
        """A checkpoint was written to this path."""

    def on_fit_end(self, training: Training) -> None:
        """The training is over; ``training.error`` is the error that ended it, or None. Always called after a start."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this callback that a checkpoint keeps, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; called before :meth:`on_fit_start`."""


# What a job needs to know of its callbacks


@dataclass(frozen=True, slots=True)
class CallbackPlan:
    """The same in every process of a job, so that all of them take part in what is shared."""

    asks: bool = False  # whether a callback may stop the training or has a state
    every: tuple[int, ...] = ()  # metrics are sent every N steps, for each N of these
    rates: bool = False  # whether the learning rate is reported
    average: Averaging | None = None  # of the weights, where one is kept
    gets_model: bool = False  # whether a callback has an on_model


NO_CALLBACKS = CallbackPlan()


def plan_of(callbacks: Sequence[Callback], *, has_run: bool) -> CallbackPlan:
    """The plan of these callbacks; refuses combinations that do not work."""
    for callback in callbacks:
        if callback.saves_to is not None and not has_run:
            name = type(callback).__name__
            raise BadSettings(f"{name} writes into the run's folder, and there is none: give run=, as run='runs/mine'")
    folders = [callback.saves_to for callback in callbacks if callback.saves_to is not None]
    if len(set(folders)) < len(folders):
        raise BadSettings(f"BestCheckpoint: two of them write to one folder, of {folders}: give each folder=")
    averages = [callback.averaging for callback in callbacks if callback.averaging is not None]
    if len(averages) > 1:
        decays = [average.decay for average in averages]
        raise BadSettings(f"{len(averages)} callbacks average the weights, with decays {decays}: give one EMA")
    return CallbackPlan(
        asks=bool(callbacks),
        every=tuple(sorted({callback.every for callback in callbacks if callback.every is not None})),
        rates=any(callback.wants_rates for callback in callbacks),
        average=averages[0] if averages else None,
        gets_model=any(type(callback).on_model is not Callback.on_model for callback in callbacks),
    )


def check_callbacks(option: str, values: Any, kind: type[Callback]) -> list[Any]:
    """The user's callbacks or loggers as a list; refuses other objects."""
    listed = [values] if isinstance(values, Callback) or not isinstance(values, Iterable) else list(values)
    for value in listed:
        name = kind.__name__
        if isinstance(value, type) and issubclass(value, Callback):
            raise BadSettings(f"{option}=[{value.__name__}]: this is the class; make one, {value.__name__}(...)")
        if not isinstance(value, kind):
            others = " (mh.EarlyStopping, mh.BestCheckpoint and others do what Lightning's and Keras's do)"
            cure = f"derive your class from mh.{name}{others if name == 'Callback' else ''}"
            raise BadSettings(f"{option}=[{value!r}]: {type_in_words(value)} is not a {name}; {cure}")
        _check_methods(value)
        if value.every is not None:
            check_count(value.every, f"{type(value).__name__}: every={value.every!r}")
    return listed


def _check_methods(callback: Callback) -> None:
    """Refuse methods that would never be called: on_train_epoch_end, as in Lightning; on_steps without a number."""
    kinds = type(callback).__mro__
    of_ours = next(kind for kind in kinds if kind.__module__.startswith("manyhands."))
    users = kinds[: kinds.index(of_ours)]
    events = sorted(name for name in dir(of_ours) if name.startswith("on_"))
    for kind in users:
        for name in vars(kind):
            if name.startswith("on_") and name not in events:
                meant = name.replace("train_", "").replace("validation", "evaluation")
                close = difflib.get_close_matches(meant, events, 1)
                hint = f" Did you mean {close[0]}?" if close else ""
                raise BadSettings(
                    f"{kind.__name__}.{name} is not an event of the training and would never be called.{hint} The "
                    f"events are {', '.join(events)}"
                )
    says_when = "every" in vars(callback) or any("every" in vars(kind) for kind in users)
    if callback.every is None and not says_when and any("on_steps" in vars(kind) for kind in users):
        name = type(callback).__name__
        raise BadSettings(f"{name}.on_steps would never be called: say after how many steps, every = 10 in {name}")


def unique_names(callbacks: Iterable[Callback]) -> list[str]:
    """A name for each, by which a checkpoint keeps its state: EarlyStopping(val_loss), Remember, Remember.2."""
    seen: dict[str, int] = {}
    unique = []
    for callback in callbacks:
        key = callback.state_key
        name = type(callback).__name__ if key is None else f"{type(callback).__name__}({key})"
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
    return unique
