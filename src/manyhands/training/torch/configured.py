"""What ``configure_optimizers`` may give: one optimizer or several, with schedulers or without.

Lightning's forms are taken as they are::

    optimizer                                                   [optimizer, ...]
    {"optimizer": optimizer, "lr_scheduler": scheduler}         [optimizer, ...], [scheduler, ...]
    {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "val_loss"}}

Beside them several optimizers may have names: ``{"critic": optimizer, "generator": {"optimizer": optimizer,
"lr_scheduler": scheduler}}``. A scheduler is stepped at the end of every epoch, as in Lightning; ``"interval": "step"``
steps it after every step. A key that the trainer does not support is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from manyhands.errors import BadSettings, type_in_words
from manyhands.training.schedules import PerEpoch, PerStep
from manyhands.training.torch.objective import SEVERAL
from manyhands.training.torch.step.several_optimizers import Key, Several

_WHO = "configure_optimizers"
_FORMS = "give a list of optimizers, or a dict as {'critic': optimizer, 'generator': {'optimizer': optimizer}}"
_OF_OPTIMIZER = ("optimizer", "lr_scheduler", "monitor")
_OF_SCHEDULER = ("scheduler", "interval", "frequency", "monitor", "strict", "name")


@dataclass
class Configured:
    """An optimizer, and the schedulers that were given with it: of each the name and the optimizer that it changes."""

    optimizer: torch.optim.Optimizer
    schedules: list[tuple[str, torch.optim.Optimizer, PerStep | PerEpoch]] = field(default_factory=list)


def configured(value: Any) -> Configured:
    """The optimizers and schedulers in the value of ``configure_optimizers``, or of a function for the optimizer."""
    if isinstance(value, torch.optim.Optimizer):
        return Configured(value)
    apart: Iterable[Any] = ()
    if _is_pair_of_lists(value):
        value, apart = value
    if isinstance(value, Mapping):
        optimizers: dict[Any, Any] = {None: value} if "optimizer" in value else dict(value)
    elif isinstance(value, (list, tuple)) and value:
        optimizers = dict(enumerate(value)) if len(value) > 1 else {None: value[0]}
    else:
        raise BadSettings(
            f"the function for the optimizer (or the model's {_WHO}) gave {type_in_words(value)}: it must give a "
            "torch.optim.Optimizer, or a list or dict of them, as Lightning's does. Schedulers may be given with them, "
            "or to the trainer: schedule=mh.PerEpoch(make) or mh.PerStep(make)"
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


def _is_pair_of_lists(value: Any) -> bool:
    """Whether it is Lightning's ``[optimizer, ...], [scheduler, ...]``."""
    return (
        isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(part, (list, tuple)) for part in value)
    )


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
    raise BadSettings(
        f"{_WHO} gave {type_in_words(schedule.make)} of an optimizer that it did not give: make it of one of those"
    )


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
        raise BadSettings(
            f"{_WHO} gave 'frequency': {config['frequency']!r}: a scheduler is stepped after every step or every epoch "
            "here. Leave it out, and give the scheduler longer intervals (StepLR(step_size=...))"
        )
    if config.get("strict", True) is not True:
        raise BadSettings(f"{_WHO} gave 'strict': {config['strict']!r}: a figure that is missing is always an error")
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
            raise BadSettings(
                f"optimizer {key!r} of {_WHO} shares parameters with another one: give each parameter to one of them"
            )
        seen |= parameters
