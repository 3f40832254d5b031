"""Tiny operations that nobody waits for, done together: statistics and counts of batch normalisation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from fuse_cases import results, step_of, traced, uncompiled
from torch import nn

from manyhands.backends import torch_fuse
from manyhands.backends import torch_parallel as backend
from manyhands.backends.torch_trace import Trace
from manyhands.training.torch import models

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)
BATCH = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(4)
STATISTICS, COUNTS = "_foreach_copy_", "_foreach_add_"


def names(found: Trace) -> Counter[str]:
    return Counter(step.task.name.partition(" [")[0] for step in found.steps)


def fused_and_equal(function: Any, *arguments: Any) -> Trace:
    """To the bit, with all that is written to."""
    found = traced(function, *arguments)
    fused = torch_fuse.fuse(found, uncompiled)
    assert backend.equal(results(fused, *arguments), results(found, *arguments)) == (True, 0.0)
    return fused


def test_those_of_all_layers_are_one_operation_each() -> None:
    torch.manual_seed(0)
    net = models.small_resnet()
    fused = fused_and_equal(step_of(net), *BATCH)
    assert names(fused)[STATISTICS] == names(fused)[COUNTS] == 1
    assert not {"copy_", "add_"} & set(names(fused))
    (written,) = (step.node for step in fused.steps if step.task.name == STATISTICS)
    assert len(written.args[0]) == 2 * 7


def test_a_layer_that_is_used_twice_keeps_its_order() -> None:
    """The second time it reads what the first time has written."""
    torch.manual_seed(0)
    norm, other = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def function(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return norm(norm(x).sin() @ x.t() @ x) + other(x)

    fused = fused_and_equal(function, torch.rand(6, 5))
    assert names(fused)["copy_"] == 2  # the first time; those of the second go with the other layer's
    assert names(fused)["add_"] == 1
    assert names(fused)[STATISTICS] == names(fused)[COUNTS] == 1


def test_who_reads_them_later_finds_them_written() -> None:
    torch.manual_seed(0)
    first, second, third = (nn.BatchNorm1d(5) for _ in range(3))

    def function(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = third(second(first(x).relu()).relu()).relu()
            return y, first.running_mean * 2, second.num_batches_tracked + 1

    fused = fused_and_equal(function, torch.rand(6, 5))
    assert names(fused)["copy_"] == names(fused)["add_"] == 1
    assert names(fused)[STATISTICS] == names(fused)[COUNTS] == 1


def test_other_writes_are_left_alone() -> None:
    """A count that is no whole number, an amount that is none, a tensor of more than one number."""
    norms = [nn.BatchNorm1d(5) for _ in range(2)]
    state = [torch.zeros(()), torch.zeros((), dtype=torch.int64), torch.zeros(2, dtype=torch.int64)]

    def function(x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = norms[1](norms[0](x).relu())
            state[0].add_(1)
            state[1].add_(2)
            state[2].add_(1)
            return y

    fused = fused_and_equal(function, torch.rand(6, 5))
    assert names(fused)["add_"] == 3
