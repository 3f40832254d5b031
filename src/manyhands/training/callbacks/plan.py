"""What callbacks need from the steps, as data that is sent to the training processes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from manyhands.errors import BadSettings, type_in_words
from manyhands.training.callbacks.best_checkpoint import BestCheckpoint
from manyhands.training.callbacks.callback import Averaging, Callback


@dataclass(frozen=True, slots=True)
class CallbackPlan:
    """The same in every process of a job, so that all of them take part in what is shared."""

    asks: bool = False  # whether a callback may stop the training or has a state
    every: tuple[int, ...] = ()  # figures are sent every N steps, for each N of these
    rates: bool = False  # whether the learning rate is reported
    average: Averaging | None = None  # of the weights, where one is kept


NO_CALLBACKS = CallbackPlan()


def plan_of(callbacks: Sequence[Callback], *, has_run: bool) -> CallbackPlan:
    """The plan of these callbacks; refuses combinations that do not work."""
    for callback in callbacks:
        if callback.needs_run and not has_run:
            name = type(callback).__name__
            raise BadSettings(f"{name} writes into the run's folder, and there is none: give run=, as run='runs/mine'")
    folders = [callback.folder for callback in callbacks if isinstance(callback, BestCheckpoint)]
    if len(set(folders)) < len(folders):
        raise BadSettings(
            f"BestCheckpoint: two of them write to one folder of the run, of {folders}: give each folder="
        )
    averages = [callback.averaging for callback in callbacks if callback.averaging is not None]
    if len(averages) > 1:
        decays = [average.decay for average in averages]
        raise BadSettings(f"{len(averages)} callbacks average the weights, with decays {decays}: give one EMA")
    return CallbackPlan(
        asks=bool(callbacks),
        every=tuple(sorted({callback.every for callback in callbacks if callback.every is not None})),
        rates=any(callback.wants_rates for callback in callbacks),
        average=averages[0] if averages else None,
    )


def checked(option: str, values: Any, kind: type[Callback]) -> list[Any]:
    """The user's callbacks or loggers as a list; refuses other objects."""
    listed = [values] if isinstance(values, Callback) or not isinstance(values, Iterable) else list(values)
    for value in listed:
        name = kind.__name__
        if isinstance(value, type) and issubclass(value, Callback):
            raise BadSettings(f"{option}=[{value.__name__}]: this is the class; make one, {value.__name__}(...)")
        if not isinstance(value, kind):
            raise BadSettings(
                f"{option}=[{value!r}]: {type_in_words(value)} is not a {name}; derive your class from mh.{name}"
                + (" (callbacks of Keras and Lightning have other events)" if name == "Callback" else "")
            )
        _check_events(value)
        _check_steps(value)
        every = value.every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise BadSettings(f"{type(value).__name__}: every={every!r}, give a number of steps of at least 1, or None")
    return listed


def _check_events(callback: Callback) -> None:
    """Refuse a method that is meant for an event and would never be called: on_train_epoch_end, as in Lightning."""
    events = sorted(name for name in dir(Callback) if name.startswith("on_"))
    for kind in type(callback).__mro__:
        if kind.__module__.startswith("manyhands."):
            return
        for name in vars(kind):
            if name.startswith("on_") and name not in events:
                close = difflib.get_close_matches(
                    name.replace("train_", "").replace("validation", "evaluation"), events, 1
                )
                meant = f" Did you mean {close[0]}?" if close else ""
                raise BadSettings(
                    f"{kind.__name__}.{name} is not an event of the training and would never be called.{meant} The "
                    f"events are {', '.join(events)}"
                )


def _check_steps(callback: Callback) -> None:
    """Refuse an ``on_steps`` that would never be called, because nothing says how often."""
    own_kinds = [kind for kind in type(callback).__mro__ if not kind.__module__.startswith("manyhands.")]
    says_when = "every" in vars(callback) or any("every" in vars(kind) for kind in own_kinds)
    if callback.every is None and not says_when and any("on_steps" in vars(kind) for kind in own_kinds):
        name = type(callback).__name__
        raise BadSettings(f"{name}.on_steps would never be called: say after how many steps, every = 10 in {name}")


def names(callbacks: Iterable[Callback]) -> list[str]:
    """A name for each, by which a checkpoint keeps its state: EarlyStopping(val_loss), Remember, Remember.2."""
    seen: dict[str, int] = {}
    unique = []
    for callback in callbacks:
        key = callback.state_key
        name = type(callback).__name__ if key is None else f"{type(callback).__name__}({key})"
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
    return unique
