"""How the learning rate changes while training: functions of progress, functions of the step, and PyTorch's schedulers.

A plain function takes how much of the training is done, from 0 to 1; :func:`by_step` marks one that takes the number of
the step. Both give a factor of the learning rate, in every framework. A scheduler of PyTorch changes the optimizer's
rates itself, after every step (:class:`PerStep`) or every epoch (:class:`PerEpoch`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.errors import BadSettings
from manyhands.training.limits.ending import ENDLESS

if TYPE_CHECKING:
    from manyhands.training.loop import Loop

HINT = (
    "a schedule is a function from how much of the training is done (0 to 1) to a factor of the learning rate, as "
    "mh.one_cycle or lambda done: 1 - done; mh.by_step(function) takes the number of the step instead"
)


@dataclass(frozen=True)
class by_step:
    """A schedule by the number of the step, from 0: ``Trainer(schedule=mh.by_step(lambda step: 0.999**step))``.

    The function gives a factor of the learning rate. An Optax schedule of rates is one of factors where it begins at 1:
    ``mh.by_step(optax.cosine_decay_schedule(1.0, 1000))``.
    """

    function: Callable[[int], float]

    def __post_init__(self) -> None:
        if isinstance(self.function, type) or not callable(self.function):
            raise BadSettings(f"by_step({self.function!r}): give a function of the step, as lambda step: 0.999**step")


Schedule = Callable[[float], float] | by_step


def check_option(schedule: Any) -> None:
    """Refuse what cannot be a schedule: when a trainer is made, not when it is used."""
    if schedule is None or isinstance(schedule, by_step):
        return
    if isinstance(schedule, type) or not callable(schedule):
        raise BadSettings(f"schedule={schedule!r}: {HINT}")


def factor(schedule: Schedule | None, loop: Loop) -> float | None:
    """The learning rate's factor at the next batch; None where there is no schedule."""
    if schedule is None:
        return None
    if isinstance(schedule, by_step):
        return _factor_at(schedule.function, loop.cursor.step, "by_step's function")
    return _factor_at(schedule, _done(loop), "schedule")


def _done(loop: Loop) -> float:
    """How much of the training is done, by the limit that is nearest to be reached."""
    epochs, steps, cursor = loop.settings.max_epochs, loop.settings.limits.max_steps, loop.cursor
    batches = loop.batches_of_epoch()
    of_epoch = min(cursor.batch / batches, 1.0) if batches else 0.0
    done = (cursor.epoch + of_epoch) / epochs if epochs < ENDLESS else 0.0
    return done if steps is None else max(done, cursor.step / steps)


def check(schedule: Schedule | None, loop: Loop) -> None:
    """A schedule by progress has to know how far the training is."""
    epochs, steps = loop.settings.max_epochs, loop.settings.limits.max_steps
    if schedule is None or isinstance(schedule, by_step) or steps is not None or loop.cursor.epoch >= epochs:
        return
    if epochs == ENDLESS:
        raise BadSettings(
            "schedule= follows how much of the training is done, and max_time alone does not say how many steps there "
            "will be: give max_epochs or Limits(max_steps=...) as well, or a schedule by the step, mh.by_step(function)"
        )
    if loop.batches_of_epoch() is not None:
        return
    if epochs == 1:
        raise BadSettings(
            "schedule= follows how much of the training is done, and the loader does not say how many batches an "
            "epoch has: give a loader with __len__, (X, y) arrays, or limits=mh.Limits(max_steps=...)"
        )
    loop.learner.notes.append(
        "the loader does not say how many batches an epoch has (it has no __len__): the schedule stands still in "
        "the first epoch and moves with every batch from the second on"
    )


def _factor_at(function: Callable[[Any], Any], at: float, name: str) -> float:
    """What the schedule says, if it is a factor."""
    try:
        value: Any = function(at)
    except TypeError as error:
        if "is not an Optimizer" not in str(error):
            raise
        raise BadSettings(f"schedule is a function of an optimizer, and {HINT}") from error
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise BadSettings(f"{name}({at:g}) gave a {type(value).__name__}: {HINT}") from error
    if not 0 <= number < math.inf:
        raise BadSettings(f"{name}({at:g}) gave {number}: a factor of the learning rate is zero or more")
    return number
