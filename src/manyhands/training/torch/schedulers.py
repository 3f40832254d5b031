"""PyTorch's own schedulers: ``Trainer(schedule=functools.partial(StepLR, step_size=30))``.

A scheduler writes learning rates into an optimizer. Here it gets a stand-in with the optimizer's groups and options
and nothing to train; the rates are copied into the optimizer before each step. So they stay numbers on the host, also
where the fast step keeps the optimizer's own on the device, and no step waits for a device.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from manyhands.backends.torch import compat
from manyhands.errors import BadSettings, type_in_words
from manyhands.training.learner import named_rates
from manyhands.training.schedules import PerEpoch, PerStep, by_step
from manyhands.training.torch.optimizers import Configured
from manyhands.training.torch.state import job_state, module_state
from manyhands.training.torch.step.logged import may_log

_NOT_COPIED = ("params", "capturable", "fused", "foreach", "differentiable")
_NOT_PLAIN = object()


class StandIn(torch.optim.Optimizer):
    """The groups and options of an optimizer, over parameters that are not trained."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        groups = []
        for group in optimizer.param_groups:
            options = {name: copy.copy(value) for name, value in group.items() if name not in _NOT_COPIED}
            groups.append({**options, "lr": float(group["lr"]), "params": [torch.nn.Parameter(torch.zeros(()))]})
        super().__init__(groups, dict(optimizer.defaults))

    def step(self, closure: Any = None) -> Any:
        """There is nothing to train."""


class Scheduler:
    """A scheduler and the optimizer whose options it sets."""

    def __init__(self, schedule: PerStep | PerEpoch, optimizer: torch.optim.Optimizer) -> None:
        self.schedule, self.optimizer = schedule, optimizer
        self.stand_in = StandIn(optimizer)
        self.base_rates = [float(group["lr"]) for group in self.stand_in.param_groups]
        self.per_step = isinstance(schedule, PerStep)
        self.is_finished = isinstance(schedule.make, LRScheduler)  # the caller's own
        self.scheduler: Any = schedule.make if self.is_finished else self._make(schedule)
        if isinstance(self.scheduler, ReduceLROnPlateau) and self.per_step:
            raise BadSettings(
                "ReduceLROnPlateau follows a metric, and there is none after every step: write "
                "schedule=mh.PerEpoch(make, monitor='val_loss') ('interval': 'epoch' in configure_optimizers)"
            )
        if self.is_finished:
            self._take_over()

    def _take_over(self) -> None:
        """Let the caller's own scheduler set the options of the stand-in, until :meth:`close`."""
        for part in _parts(self.scheduler):
            if part.optimizer is not self.optimizer:
                raise BadSettings(
                    f"schedule: the {type(part).__name__} belongs to another optimizer than the trainer's: give that "
                    "one to the trainer too, Trainer(optimizer=optimizer, schedule=mh.PerStep(scheduler))"
                )
        for part in _parts(self.scheduler):
            part.optimizer = self.stand_in

    def _make(self, schedule: PerStep | PerEpoch) -> Any:
        try:
            scheduler = schedule.make(self.stand_in)
        except TypeError as error:
            if not isinstance(schedule.make, type):
                raise
            given = f"mh.{type(schedule).__name__}({schedule.make.__name__}, name=value)"
            raise BadSettings(f"{error}: give it with its arguments, as schedule={given}") from error
        if not isinstance(scheduler, LRScheduler):
            raise BadSettings(f"the function gave {type_in_words(scheduler)}: give one of torch.optim.lr_scheduler")
        return scheduler

    @property
    def monitor(self) -> str | None:
        """The metric that the scheduler follows; None: it follows none."""
        return self.schedule.monitor if isinstance(self.scheduler, ReduceLROnPlateau) else None  # type: ignore[union-attr]

    @property
    def why_not_captured(self) -> str | None:
        """Why steps with this scheduler cannot be captured: a CUDA graph takes a new learning rate and nothing else."""
        for part in _parts(self.scheduler):
            if getattr(part, "cycle_momentum", False):
                return f"{type(part).__name__} changes the momentum from step to step (cycle_momentum=False does not)"
            if not type(part).__module__.startswith("torch."):
                return f"{type(part).__name__} is a scheduler of your own: it may change more than the learning rate"
        return None

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.stand_in.param_groups]

    def apply(self) -> None:
        """Give the optimizer the options of the next step."""
        for group, scheduled in zip(self.optimizer.param_groups, self.stand_in.param_groups, strict=True):
            for name, value in scheduled.items():
                if name in _NOT_COPIED or name not in group:  # how it runs is not the scheduler's
                    continue
                if isinstance(group[name], torch.Tensor):
                    group[name].fill_(value)
                elif name == "lr" or group[name] != value:
                    group[name] = value

    def step(self, metric: float | None = None) -> None:
        """The next step, epoch or metric."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the stand-in makes no steps
            self.scheduler.step() if metric is None else self.scheduler.step(metric)

    # Checkpoints

    def state(self) -> dict[str, Any]:
        groups = [_plain(group) for group in self.stand_in.param_groups]
        saved = {"scheduler": _plain(self.scheduler.state_dict()), "groups": groups, "base": self.base_rates}
        encoded = {key: module_state.encode(value, {}) for key, value in saved.items()}
        return {"name": type(self.scheduler).__name__, **encoded}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned; if the job has other learning rates, scale the saved ones."""
        name = type(self.scheduler).__name__
        if saved["name"] != name:
            raise BadSettings(f"the run was started with the scheduler {saved['name']}, this job has {name}: keep it")
        state = {
            key: module_state.decode(saved[key], {}, torch.device("cpu")) for key in ("scheduler", "groups", "base")
        }
        self.scheduler.load_state_dict(_merge(self.scheduler.state_dict(), state["scheduler"]))
        for number, (group, before) in enumerate(zip(self.stand_in.param_groups, state["groups"], strict=True)):
            rate, saved_rate = self.base_rates[number], state["base"][number]
            group.update(_merge({name: group.get(name) for name in before}, before))
            if rate != saved_rate and saved_rate:
                for key in ("lr", "initial_lr"):
                    if key in group:
                        group[key] *= rate / saved_rate
                for part in _parts(self.scheduler):
                    if number < len(getattr(part, "base_lrs", ())):
                        part.base_lrs[number] *= rate / saved_rate

    def close(self) -> None:
        """Give the caller's own scheduler back to the caller's optimizer."""
        if self.is_finished:
            for part in _parts(self.scheduler):
                part.optimizer = self.optimizer
            self.apply()


class Schedulers:
    """The schedulers of a job: the trainer's, or those that came with its optimizers, by name."""

    def __init__(self, parts: Mapping[str, Scheduler], model: torch.nn.Module) -> None:
        self.parts, self.follows_any = dict(parts), may_log(model)  # metrics of any name

    @property
    def monitors(self) -> list[str]:
        """The metrics that they follow."""
        return list(dict.fromkeys(part.monitor for part in self.parts.values() if part.monitor is not None))

    @property
    def why_not_captured(self) -> str | None:
        return next((part.why_not_captured for part in self.parts.values() if part.why_not_captured is not None), None)

    def rates(self, optimizer: torch.optim.Optimizer) -> list[float]:
        """The learning rate of each group of the job's optimizer, as the host set it."""
        scheduled = {
            id(group): rate
            for part in self.parts.values()
            for group, rate in zip(part.optimizer.param_groups, part.rates, strict=True)
        }
        groups = optimizer.param_groups
        return [scheduled[id(group)] if id(group) in scheduled else float(group["lr"]) for group in groups]

    def apply(self) -> None:
        for part in self.parts.values():
            part.apply()

    def after_step(self) -> None:
        for part in self.parts.values():
            if part.per_step:
                part.step()

    def after_epoch(self) -> None:
        for part in self.parts.values():
            if not part.per_step and part.monitor is None:
                part.step()

    def after_metric(self, monitor: str, value: float) -> None:
        for part in self.parts.values():
            if part.monitor == monitor:
                part.step(value)

    def state(self) -> dict[str, Any]:
        if list(self.parts) == [""]:
            return self.parts[""].state()
        return {"parts": {name: part.state() for name, part in self.parts.items()}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        before = saved.get("parts", {"": saved})
        if before.keys() != self.parts.keys():
            then, now = (", ".join(map(repr, names)) or "none" for names in (before, self.parts))
            raise BadSettings(f"the run was started with schedulers for {then}, this job has some for {now}: keep them")
        for name, part in self.parts.items():
            part.restore(before[name])

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


class Rates:
    """The learning rates of a job's steps, and how its optimizer ran before the job changed that."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Schedulers | None) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._run_options = job_state.run_options(optimizer)
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._factor = 1.0

    def set(self, factor: float | None) -> None:
        """Set the rates of the next step: those of the scheduler, or the first ones times ``factor``."""
        if self._scheduler is not None:
            self._scheduler.apply()
        if factor is None:
            return
        self._factor = factor
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

    def by_name(self) -> dict[str, float]:
        """The rates as the host set them: a captured step keeps its own on the device."""
        if self._scheduler is not None:
            return named_rates(self._scheduler.rates(self._optimizer))
        return named_rates([base * self._factor for base in self._base])

    def restore_options(self) -> None:
        """The optimizer runs as it did before the job, with its first rates."""
        job_state.restore_run_options(self._optimizer, self._run_options, self._base)

    def close(self) -> None:
        self.restore_options()
        if self._scheduler is not None:
            self._scheduler.close()


def as_schedule(schedule: Any) -> Any:
    """A scheduler, its class, or a function that makes one, with the moments at which PyTorch's documentation steps it.

    A function that makes one has ``optimizer`` as its first parameter; what it makes is seen by calling it.
    """
    if isinstance(schedule, by_step | PerStep | PerEpoch) or not (
        callable(schedule) or isinstance(schedule, LRScheduler)
    ):
        return schedule
    made: Any = schedule
    if callable(schedule):
        first = None
        with contextlib.suppress(TypeError, ValueError):  # of some functions in C nothing is known
            first = next(iter(inspect.signature(schedule).parameters), None)
        if first != "optimizer":  # it may be a function of progress, which is not called before it is needed
            return schedule
        with contextlib.suppress(Exception):  # it fails with the job's own optimizer, too
            made = schedule(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    kind = made if isinstance(made, type) else type(made)
    if not issubclass(kind, LRScheduler):
        return schedule
    return PerStep(schedule) if issubclass(kind, (OneCycleLR, CyclicLR)) else PerEpoch(schedule)


def schedulers_of(schedule: Any, configured: Configured, model: torch.nn.Module) -> Schedulers | None:
    """The schedulers of the trainer's ``schedule``, or those of ``configure_optimizers``."""
    given = [("", configured.optimizer, schedule)] if isinstance(schedule, PerStep | PerEpoch) else configured.schedules
    parts = {name: Scheduler(part, optimizer) for name, optimizer, part in given}
    return Schedulers(parts, model) if parts else None


def restore_final_state(schedule: Any, optimizer: Any, saved: Mapping[str, Any] | None) -> None:
    """Bring the caller's own scheduler to where the one in a worker is."""
    if saved is not None and isinstance(getattr(schedule, "make", None), LRScheduler):
        scheduler = Scheduler(schedule, optimizer)
        scheduler.restore(saved)
        scheduler.close()


def _parts(scheduler: Any) -> list[Any]:
    """The scheduler and those inside it (SequentialLR, ChainedScheduler)."""
    return [scheduler, *(part for inner in compat.inner_schedulers(scheduler) for part in _parts(inner))]


def _plain(value: Any) -> Any:
    """The part of a state that has a form in JSON; functions stay the job's own."""
    if isinstance(value, Mapping):
        parts = {key: _plain(part) for key, part in value.items() if key != "params"}
        return {key: part for key, part in parts.items() if part is not _NOT_PLAIN}
    if isinstance(value, (list, tuple)):
        parts_of_list = [_plain(part) for part in value]
        return _NOT_PLAIN if any(part is _NOT_PLAIN for part in parts_of_list) else type(value)(parts_of_list)
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else _NOT_PLAIN
    return value if type(value) in (bool, int, float, str, type(None)) else _NOT_PLAIN


def _merge(current: Any, saved: Any) -> Any:
    """The current state, updated with the saved values, in the scheduler's own types."""
    if isinstance(current, Counter):
        return Counter(saved)
    if isinstance(current, Mapping) and isinstance(saved, Mapping):
        return {**current, **{key: _merge(current.get(key), part) for key, part in saved.items()}}
    if isinstance(current, list) and isinstance(saved, list) and len(current) == len(saved):
        return [_merge(part, saved_part) for part, saved_part in zip(current, saved, strict=True)]
    return saved
