"""Operations in place in a trace: pure ones instead, where nobody can tell the difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from region_cases import regions, results, traced, uncompiled
from torch import nn

from manyhands.backends.torch import planning as backend
from manyhands.backends.torch.passes import regions as torch_fuse
from manyhands.backends.torch.passes.out_of_place import make_out_of_place

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)


def two_in_a_row(x: torch.Tensor) -> Any:
    y = x @ x
    before = y.sum()
    y.relu_()
    z = y.add_(1)
    return before, y * 2, z @ x


def a_view_looks_on(x: torch.Tensor) -> Any:
    y = x @ x
    row = y[0]
    y.mul_(2)
    return row + 1, y


def the_callers(x: torch.Tensor) -> Any:
    x.add_(1)
    return x @ x


def another_type(x: torch.Tensor) -> Any:
    y = (x @ x).bfloat16()
    y.add_(x)
    return y


@pytest.mark.parametrize(
    ("function", "left"),
    [(two_in_a_row, set()), (a_view_looks_on, {"mul_"}), (the_callers, {"add_"}), (another_type, {"add_"})],
)
def test_only_what_nobody_sees_is_replaced(function: Callable[..., Any], left: set[str]) -> None:
    x = torch.rand(4, 4)
    found = traced(function, x.clone())
    pure = make_out_of_place(found)
    assert {step.task.name for step in pure.steps if step.task.name.endswith("_")} == left
    assert backend.equal(results(pure, x.clone()), results(found, x.clone())) == (True, 0.0)


class Residual(nn.Module):
    """A block as in torchvision's ResNets: normalisation in eval mode, ReLU and addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3)])
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        y += x
        return self.relu(y)


def test_normalisation_in_eval_mode_is_compiled_with_what_follows_in_place() -> None:
    torch.manual_seed(0)
    net, x = Residual().eval(), torch.rand(2, 3, 8, 8)
    found = traced(torch.no_grad()(net), x)
    fused = torch_fuse.fuse(found, uncompiled)
    assert [step.task.name.partition(" [")[0] for step in fused.steps] == [
        "convolution",
        "fused native_batch_norm_legit_no_training relu",
        "convolution",
        "fused native_batch_norm_legit_no_training add relu",
    ]
    assert len(regions(fused)) == 2
    assert backend.equal(results(fused, x), results(found, x)) == (True, 0.0)
