"""The optimizer of a job: a name, a class, a function, a finished one, or what ``configure_optimizers`` gives.

:mod:`manyhands.training.optimizers` says whose learning rate counts. ``configure_optimizers`` may give one optimizer or
several, with schedulers or without, in Lightning's forms; several may have names, ``{"critic": optimizer, "generator":
{"optimizer": optimizer, "lr_scheduler": scheduler}}``. A key that the trainer does not support is an error.
"""

from __future__ import annotations

import functools
import operator
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from manyhands.errors import BadSettings, type_in_words
from manyhands.training.optimizers import Optimizers
from manyhands.training.schedules import PerEpoch, PerStep
from manyhands.training.torch.objective import SEVERAL

Key = int | str  # of one of several optimizers
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]

# One takes sparse gradients only, the other a function that computes the loss again.
_NOT_NAMED = (torch.optim.SparseAdam, torch.optim.LBFGS)


def _by_name() -> dict[str, type]:
    base = torch.optim.Optimizer
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return {kind.__name__.lower(): kind for kind in kinds if issubclass(kind, base) and kind not in (base, *_NOT_NAMED)}


OPTIMIZERS = Optimizers(
    where="torch.optim",
    example="torch.optim.AdamW",
    finished=(torch.optim.Optimizer,),
    by_name=_by_name,
    sgd=torch.optim.SGD,
    rate="lr",
    of_parameters=True,
)


def optimizer_for(model: Any, optimizer: Any, lr: float | None) -> torch.optim.Optimizer | MakeOptimizer:
    """The user's optimizer, or a function from a model to one (a job makes it in its worker process)."""
    if OPTIMIZERS.configured_by(model, optimizer, lr):
        return operator.methodcaller(_WHO)
    if isinstance(optimizer, torch.optim.Optimizer):
        of_model = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in of_model for group in optimizer.param_groups for parameter in group["params"]):
            raise BadSettings("the optimizer has parameters of another model: make it with model.parameters()")
        return optimizer
    return functools.partial(_of_parameters, *OPTIMIZERS.maker(model, optimizer, lr))


def _of_parameters(
    make: Callable[..., torch.optim.Optimizer], rate: dict[str, float], model: torch.nn.Module
) -> torch.optim.Optimizer:
    """``make`` is a class, or a function of the parameters, as ``lambda p: torch.optim.AdamW(p, lr=1e-3)``."""
    return make(model.parameters(), **rate)


_WHO = "configure_optimizers"
_FORMS = "give a list of optimizers, or a dict as {'critic': optimizer, 'generator': {'optimizer': optimizer}}"
_OF_OPTIMIZER = ("optimizer", "lr_scheduler", "monitor")
_OF_SCHEDULER = ("scheduler", "interval", "frequency", "monitor", "strict", "name")


@dataclass
class Configured:
    """An optimizer, and the schedulers that were given with it: of each the name and the optimizer that it changes."""

    optimizer: torch.optim.Optimizer
    schedules: list[tuple[str, torch.optim.Optimizer, PerStep | PerEpoch]] = field(default_factory=list)


def configuration_of(value: Any) -> Configured:
    """The optimizers and schedulers in the value of ``configure_optimizers``, or of a function for the optimizer."""
    if isinstance(value, torch.optim.Optimizer):
        return Configured(value)
    apart: Iterable[Any] = ()
    kinds = (list, tuple)
    if isinstance(value, kinds) and len(value) == 2 and all(isinstance(part, kinds) for part in value):
        value, apart = value  # Lightning's [optimizer, ...], [scheduler, ...]
    if isinstance(value, Mapping):
        optimizers: dict[Any, Any] = {None: value} if "optimizer" in value else dict(value)
    elif isinstance(value, (list, tuple)) and value:
        optimizers = dict(enumerate(value)) if len(value) > 1 else {None: value[0]}
    else:
        raise BadSettings(
            f"the function for the optimizer (or the model's {_WHO}) gave {type_in_words(value)}: it must give a "
            "torch.optim.Optimizer, or a list or dict of them, as Lightning's does"
        )
    several: dict[Any, torch.optim.Optimizer] = {}
    schedules: dict[Any, PerStep | PerEpoch | None] = {}
    for key, optimizer in optimizers.items():
        several[key], schedules[key] = _entry(optimizer)
    _check_distinct(several)
    for config in apart:
        key, schedule = _with_owner(config, several)
        if schedules[key] is not None:
            raise BadSettings(f"{_WHO} gave two schedulers for one optimizer: put them together in a ChainedScheduler")
        schedules[key] = schedule
    by_optimizer = [
        ("" if key is None else str(key), several[key], schedule)
        for key, schedule in schedules.items()
        if schedule is not None
    ]
    return Configured(several[None] if None in several else Several(several), by_optimizer)


def _entry(entry: Any) -> tuple[torch.optim.Optimizer, PerStep | PerEpoch | None]:
    """One of the optimizers, and its scheduler."""
    if isinstance(entry, torch.optim.Optimizer):
        return entry, None
    if not isinstance(entry, Mapping) or not isinstance(entry.get("optimizer"), torch.optim.Optimizer):
        raise BadSettings(f"{_WHO} gave {type_in_words(entry)} among its optimizers: {_FORMS}")
    _check_keys(entry, _OF_OPTIMIZER, "beside an optimizer")
    optimizer: torch.optim.Optimizer = entry["optimizer"]
    config = entry.get("lr_scheduler")
    schedule = None if config is None else _schedule(config, entry.get("monitor"))
    return optimizer, schedule


def _with_owner(config: Any, optimizers: Mapping[Any, torch.optim.Optimizer]) -> tuple[Any, PerStep | PerEpoch]:
    """A scheduler of a list apart, and the key of the optimizer that it belongs to."""
    schedule = _schedule(config)
    for key, optimizer in optimizers.items():
        if schedule.make.optimizer is optimizer:
            return key, schedule
    raise BadSettings(f"{_WHO} gave {type_in_words(schedule.make)} of an optimizer that it did not give")


def _schedule(config: Any, monitor: str | None = None) -> PerStep | PerEpoch:
    """The scheduler in Lightning's ``lr_scheduler``: a scheduler, or a dict with one."""
    if not isinstance(config, Mapping):
        config = {"scheduler": config}
    _check_keys(config, _OF_SCHEDULER, "with a scheduler")
    scheduler, interval = config.get("scheduler"), config.get("interval", "epoch")
    if not isinstance(scheduler, LRScheduler):
        raise BadSettings(
            f"{_WHO} gave {type_in_words(scheduler)} as a scheduler: give one of torch.optim.lr_scheduler, "
            "{'optimizer': optimizer, 'lr_scheduler': {'scheduler': scheduler, 'interval': 'step'}}"
        )
    if interval not in ("step", "epoch"):
        raise BadSettings(f"{_WHO} gave 'interval': {interval!r}: give 'step' or 'epoch'")
    if config.get("frequency", 1) != 1:
        frequency = f"{_WHO} gave 'frequency': {config['frequency']!r}"
        raise BadSettings(f"{frequency}: leave it out, and give the scheduler longer intervals (StepLR(step_size=...))")
    if config.get("strict", True) is not True:
        raise BadSettings(f"{_WHO} gave 'strict': {config['strict']!r}: a metric that is missing is always an error")
    if interval == "step":
        return PerStep(scheduler)
    return PerEpoch(scheduler, config.get("monitor") or monitor or "val_loss")


def _check_keys(config: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in config:
        if key == "every":
            raise BadSettings(f"{_WHO} gave 'every' {where}: call minimize in those batches only, {SEVERAL}")
        if key not in known:
            raise BadSettings(f"{_WHO} gave {key!r} {where}: known are {', '.join(known)}")


def _check_distinct(optimizers: Mapping[Key | None, torch.optim.Optimizer]) -> None:
    seen: set[int] = set()
    for key, optimizer in optimizers.items():
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if parameters & seen:
            raise BadSettings(f"optimizer {key!r} of {_WHO} shares parameters with another one: give each to one")
        seen |= parameters


# Several optimizers as one


class _States(ChainMap[Any, Any]):
    """The states of all optimizers as one mapping; each parameter is in one of them."""

    def __getitem__(self, parameter: Any) -> Any:
        for state in self.maps:  # each makes an entry for whatever it is asked
            if parameter in state:
                return state[parameter]
        raise KeyError(parameter)

    def __delitem__(self, parameter: Any) -> None:
        for state in self.maps:
            state.pop(parameter, None)


class Several(torch.optim.Optimizer):
    """Several optimizers as one, for all that is not a step: states, groups, rates and checkpoints.

    They are sorted by name: a checkpoint of ``{"critic": ..., "generator": ...}`` fits a job with ``{"generator": ...,
    "critic": ...}``.
    """

    def __init__(self, optimizers: Mapping[Key, torch.optim.Optimizer]) -> None:
        self.by_name = {key: optimizers[key] for key in sorted(optimizers, key=lambda key: (type(key).__name__, key))}
        self.defaults: dict[str, Any] = {}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [*self.by_name.values()]

    @property
    def name(self) -> str:
        """Each name and kind, as a checkpoint has to match them."""
        return ", ".join(f"{key}: {type(optimizer).__name__}" for key, optimizer in self.by_name.items())

    @property
    def group_names(self) -> list[str]:
        """The name of the optimizer of each group of parameters, with a number where it has several groups."""
        counts = {key: len(optimizer.param_groups) for key, optimizer in self.by_name.items()}
        return [
            f"{key}.{number}" if count > 1 else f"{key}" for key, count in counts.items() for number in range(count)
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return _States(*(optimizer.state for optimizer in self.optimizers))

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of one optimizer for all parameters."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for optimizer in self.optimizers:
            part = optimizer.state_dict()
            state |= {first + number: value for number, value in part["state"].items()}
            for group in part["param_groups"]:
                groups.append(group | {"params": [first + number for number in group["params"]]})
            first += _count(optimizer)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups, first = list(state_dict["param_groups"]), 0
        for optimizer in self.optimizers:
            last = first + _count(optimizer)
            own_groups, groups = groups[: len(optimizer.param_groups)], groups[len(optimizer.param_groups) :]
            optimizer.load_state_dict(
                {
                    "state": {n - first: value for n, value in state_dict["state"].items() if first <= n < last},
                    "param_groups": [group | {"params": [n - first for n in group["params"]]} for group in own_groups],
                }
            )
            first = last

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def __repr__(self) -> str:
        return f"Several({self.name})"


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
