"""Several optimizers as one, for all that is not a step: states, groups, rates and checkpoints."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch

Key = int | str


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
