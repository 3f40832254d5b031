"""How the learning rate changes while training: functions of progress, functions of the step, and PyTorch's schedulers.

A plain function takes how much of the training is done, from 0 to 1; :func:`by_step` marks one that takes the number of
the step. Both give a factor of the learning rate, in every framework. A scheduler of PyTorch changes the optimizer's
rates itself, after every step (:class:`PerStep`) or every epoch (:class:`PerEpoch`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from manyhands.errors import BadSettings, type_in_words
from manyhands.training.callbacks.builtin import is_known, known_metrics, missing_metric, several_values
from manyhands.training.callbacks.callback import NO_METRICS
from manyhands.training.learner import Learner, share
from manyhands.training.options import ENDLESS

if TYPE_CHECKING:
    from manyhands.training.data.order import Position

HINT = (
    "a schedule is a function from how much of the training is done (0 to 1) to a factor of the learning rate, as "
    "mh.one_cycle or lambda done: 1 - done; mh.by_step(function) takes the number of the step instead. PyTorch's "
    "schedulers are given as they are, or as a function from an optimizer to a scheduler"
)


def one_cycle(done: float) -> float:
    """Rises linearly to 1 during the first fifth, then falls to 0 along a cosine."""
    return done / 0.2 + 0.04 if done < 0.19 else 0.5 + 0.5 * math.cos(math.pi * min(1.0, (done - 0.19) / 0.81))


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


class _Scheduler:
    def __init__(self, make: Any, **arguments: Any) -> None:
        if not callable(make) and not hasattr(make, "optimizer"):
            name = type(self).__name__
            raise BadSettings(
                f"{name}({make!r}): give a scheduler's class with its arguments, as mh.{name}(StepLR, step_size=100), "
                "a function from an optimizer to a scheduler, or a scheduler object"
            )
        self.make: Any = functools.partial(make, **arguments) if arguments else make


class PerStep(_Scheduler):
    """A scheduler of PyTorch's that is stepped after every step: ``schedule=mh.PerStep(StepLR, step_size=100)``.

    Its class with arguments, a function from an optimizer to a scheduler, or a scheduler object over the optimizer that
    the trainer is given.
    """


class PerEpoch(_Scheduler):
    """A scheduler of PyTorch's that is stepped after every epoch: ``schedule=mh.PerEpoch(StepLR, step_size=3)``.

    What is given is as in :class:`PerStep`. ``ReduceLROnPlateau`` is stepped with the metric ``monitor`` instead,
    whenever there is a new one: after each evaluation, or for ``train_loss`` with each row.
    """

    def __init__(self, make: Any, monitor: str = "val_loss", **arguments: Any) -> None:
        super().__init__(make, **arguments)
        self.monitor = monitor


_OF_RATES = ("keras.src.optimizers.schedules", "mxnet.lr_scheduler", "optax.")
Schedule = Callable[[float], float] | by_step | PerStep | PerEpoch


def check_option(schedule: Any, *, schedulers: bool) -> None:
    """Refuse what cannot be a schedule: when a trainer is made, not when it is used."""
    if isinstance(schedule, _Scheduler) and not schedulers:
        raise BadSettings(
            f"schedule={type(schedule).__name__}(...) is for PyTorch's schedulers: here a schedule of rates is given "
            "to the optimizer (optax.adam(schedule), keras.optimizers.SGD(schedule), "
            "mx.optimizer.SGD(lr_scheduler=scheduler)), and one of factors as schedule=mh.by_step(function)"
        )
    if schedule is None or isinstance(schedule, by_step | _Scheduler):
        return
    modules = [getattr(schedule, "__module__", "") or "", *(kind.__module__ for kind in type(schedule).__mro__)]
    if any(module.startswith(_OF_RATES) for module in modules):
        raise BadSettings(
            f"schedule={schedule!r} is a schedule of learning rates, and here a schedule gives factors of the rate: "
            "give it to the optimizer (keras.optimizers.SGD(schedule), mx.optimizer.SGD(lr_scheduler=schedule))"
        )
    if isinstance(schedule, type) or not callable(schedule):
        raise BadSettings(f"schedule={schedule!r}: {HINT}")


class ScheduleOfJob:
    """The schedule of one job: functions give a factor for each step, PyTorch's schedulers are stepped."""

    def __init__(self, schedule: Schedule | None, learner: Learner, position: Position) -> None:
        self._schedule, self._learner, self._position = schedule, learner, position
        # PyTorch's schedulers, which the learner has made; others have none.
        self._scheduler: Any = getattr(learner, "scheduler", None)

    @property
    def _monitors(self) -> Sequence[str]:
        return [] if self._scheduler is None else self._scheduler.monitors

    def factor(self) -> float | None:
        """The learning rate's factor at the next batch; None where there is no schedule."""
        if self._schedule is None or isinstance(self._schedule, _Scheduler):
            return None
        if isinstance(self._schedule, by_step):
            return _factor_at(self._schedule.function, self._position.cursor.step, "by_step's function")
        return _factor_at(self._schedule, self._position.done, "schedule")

    def check(self, metrics: Sequence[str]) -> None:
        """A schedule by progress has to know how far the training is; a scheduler may follow a metric."""
        known = known_metrics(metrics, validates=self._learner.test is not None, rates=False)
        for name in self._monitors:
            if not (self._scheduler.follows_any or is_known(name, known)):
                raise BadSettings(f"PerEpoch(monitor={name!r}): {missing_metric(name, known)}")
        position, epochs = self._position, self._position.settings.max_epochs
        if self._schedule is None or isinstance(self._schedule, by_step | _Scheduler):
            return
        if position.settings.limits.max_steps is not None or position.cursor.epoch >= epochs:
            return
        if epochs < ENDLESS and position.batches is not None:
            return
        if not 1 < epochs < ENDLESS:
            raise BadSettings(
                "schedule= follows how much of the training is done, and max_time alone does not say how many steps "
                "there will be, nor does a loader without __len__ for one epoch: give Limits(max_steps=...), or a "
                "schedule by the step, mh.by_step(function)"
            )
        self._learner.notes.append(
            "the loader does not say how many batches an epoch has (it has no __len__): the schedule is constant in "
            "the first epoch and moves with every batch from the second on"
        )

    def after_row(self, row: Mapping[str, Any], *, evaluated: bool) -> None:
        """Step schedulers that follow a metric, where the row has a new one; the same in all processes."""
        for monitor in self._monitors:
            value = share(self._learner, row.get(monitor))
            if isinstance(value, list):
                raise several_values(f"PerEpoch(monitor={monitor!r})", monitor, value)
            if value is not None:
                self._scheduler.after_metric(monitor, float(value))
            elif evaluated or self._learner.test is None:
                known = [name for name, value in row.items() if name not in NO_METRICS and value is not None]
                raise BadSettings(f"PerEpoch(monitor={monitor!r}): {missing_metric(monitor, known)}")

    def after_epoch(self) -> None:
        """Step schedulers that go by epochs."""
        if self._scheduler is not None:
            self._scheduler.after_epoch()


def _factor_at(function: Callable[[Any], Any], at: float, name: str) -> float:
    """The factor that the schedule returns; refuses any other value."""
    value: Any = function(at)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise BadSettings(f"{name}({at:g}) gave {type_in_words(value)}: {HINT}") from error
    if not 0 <= number < math.inf:
        raise BadSettings(f"{name}({at:g}) gave {number}: a factor of the learning rate is zero or more")
    return number
