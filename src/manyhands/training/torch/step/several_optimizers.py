"""A model with several optimizers, as a GAN has them: each batch is a step of every optimizer, one after the other.

``configure_optimizers`` gives a list or a dict of optimizers, and ``training_step(batch, batch_idx, optimizer_idx)``
the loss of one of them (``optimizer_idx`` is its number, or its name in the dict). For each batch, and each optimizer
in order: forward, backward, sum over the ranks, clip, update. Only that optimizer's parameters get gradients meanwhile;
the others are frozen, and what they compute still leads gradients through. For example a generator and a
discriminator::

    batch 0   d: loss of real and generated samples -> update of d;   g: loss through d -> update of g
    batch 1   ...

``{"d": d, "g": {"optimizer": g, "every": 5}}`` makes a step of g in every fifth batch only: 0, 5, 10, ...
"""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.training.torch.data.batches import Shard
from manyhands.training.torch.step.average import Average
from manyhands.training.torch.step.eager import EagerStep

Key = int | str


@dataclass(frozen=True)
class Entry:
    """One of several optimizers, and in which batches it makes a step."""

    optimizer: torch.optim.Optimizer
    every: int = 1


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

    ``entries`` are in the order of the steps. Everything else is sorted by name: a checkpoint of
    ``{"critic": ..., "generator": ...}`` fits a job with ``{"generator": ..., "critic": ...}``.
    """

    def __init__(self, entries: Mapping[Key, Entry]) -> None:
        self.entries = dict(entries)
        self.defaults: dict[str, Any] = {}
        self._sorted = sorted(self.entries, key=lambda key: (type(key).__name__, key))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """By name, not in the order of the steps."""
        return [self.entries[key].optimizer for key in self._sorted]

    @property
    def name(self) -> str:
        """Each name and kind, as a checkpoint has to match them."""
        return ", ".join(f"{key}: {type(self.entries[key].optimizer).__name__}" for key in self._sorted)

    @property
    def group_names(self) -> list[str]:
        """The name of the optimizer of each group of parameters, with a number where it has several groups."""
        counts = {key: len(self.entries[key].optimizer.param_groups) for key in self._sorted}
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


class SeveralSteps:
    """The steps of several optimizers, as one step of the rank."""

    undo = None  # a batch that is skipped would have to take back all updates: refused

    def __init__(
        self,
        steps: Mapping[Key, EagerStep],
        optimizer: Several,
        model: torch.nn.Module,
        average: Average | None = None,
    ) -> None:
        self._steps, self.optimizer, self.model, self.average = dict(steps), optimizer, model, average
        self._first = first = next(iter(self._steps.values()))
        self.device, self.metrics, self.clock, self.number_format = (
            first.device,
            first.metrics,
            first.clock,
            first.number_format,
        )

    def versions(self) -> list[int]:
        return [version for step in self._steps.values() for version in step.versions()]

    def close(self) -> None:
        for step in self._steps.values():
            step.close()


class EachOptimizer(SeveralSteps):
    """The step of a batch: that of each optimizer, in order."""

    def __call__(self, shard: Shard | None, whole: int, step: int, batch_idx: int = 0) -> None:
        for key, eager in self._steps.items():
            if step % self.optimizer.entries[key].every == 0:
                with _only(eager.parameters, self.model):
                    eager(shard, whole, step, batch_idx)
        if self.average is not None:
            self.average.update()


@contextlib.contextmanager
def _only(parameters: Sequence[torch.Tensor], model: torch.nn.Module) -> Iterator[None]:
    """Only these parameters get gradients."""
    chosen = {id(parameter) for parameter in parameters}
    others = [other for other in model.parameters() if other.requires_grad and id(other) not in chosen]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
