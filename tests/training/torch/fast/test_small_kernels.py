"""Casts of weights and counts of batches in one kernel each: the same results, in fewer operations."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.training.torch.fast.small_kernels import SmallKernels


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 4), nn.BatchNorm1d(4))


def stepped(model: nn.Module, mode: Any, optimizer: Any) -> Counter[str]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    with Operations() as operations:
        with torch.autocast("cpu", dtype=torch.bfloat16), mode or torch.enable_grad():
            loss = model(x).float().square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return operations.counts


def test_the_same_results_in_fewer_operations() -> None:
    plain, ours = net(), net()
    mode = SmallKernels(ours)
    for _ in range(3):
        counts = [
            stepped(model, each, torch.optim.SGD(model.parameters(), lr=0.1))
            for model, each in ((plain, None), (ours, mode))
        ]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name
    assert counts[1]["aten::_to_copy"] <= counts[0]["aten::_to_copy"] - 3
    assert counts[1]["aten::add_"] == counts[0]["aten::add_"] - 3
    assert counts[1]["aten::_foreach_add_"] == 2  # a layer that is called twice counts twice
    assert "casts of weights" in str(mode.explain())


def test_a_weight_that_is_changed_in_the_pass_is_cast_again() -> None:
    class Renormalising(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.div_(self.weight.norm())
            return super().forward(x)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Renormalising(4, 4))
    ours = copy.deepcopy(plain)
    mode = SmallKernels(ours)
    for _ in range(3):
        stepped(plain, None, torch.optim.SGD(plain.parameters(), lr=0.1))
        stepped(ours, mode, torch.optim.SGD(ours.parameters(), lr=0.1))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
