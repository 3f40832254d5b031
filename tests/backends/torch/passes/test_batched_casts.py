"""Tiny operations that nobody waits for, done together: statistics and counts of batch normalisation, and casts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from region_cases import results, step_of, traced, uncompiled
from torch import nn

from manyhands.backends.torch import planning as backend
from manyhands.backends.torch.capture import call as torch_call
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes import regions
from manyhands.schedule.check import check
from manyhands.schedule.graph import graph
from manyhands.schedule.lanes import lanes_for, schedule
from manyhands.training.torch.book import models

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
    fused = regions.fuse(found, uncompiled)
    assert backend.equal(results(fused, *arguments), results(found, *arguments)) == (True, 0.0)
    return fused


# Statistics and counts


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
    assert names(fused)["copy_"] == 1
    assert not names(fused)["add_"]  # the count is read behind the last one
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


# Casts


def together(fused: Trace) -> list[int]:
    """How many casts are one operation, for each such operation."""
    return [len(step.node.args[0]) for step in fused.steps if step.task.name == "_foreach_copy_"]  # type: ignore[arg-type]


def test_weights_are_cast_at_once() -> None:
    """But for what the first product waits for."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Tanh(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3))

    def function(x: torch.Tensor) -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return net(x)

    fused = fused_and_equal(function, torch.rand(2, 6))
    assert together(fused) == [4]
    assert names(fused)["_to_copy"] == 3  # the input, the first weight and its bias
    order = [step.task.name.partition(" [")[0] for step in fused.steps]
    assert order.index("addmm") > max(place for place, name in enumerate(order) if name == "_to_copy")


def test_casts_keep_their_forms_and_their_kinds() -> None:
    """Strides, other types, one tensor cast twice, and one that was written to before."""
    torch.manual_seed(0)
    laid = torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last)
    flipped, whole = torch.rand(3, 5).t(), torch.arange(12).view(3, 4)
    changed, product = torch.rand(4), torch.rand(4, 4)

    def function(x: torch.Tensor) -> Any:
        first = (x.double() @ x.double()).sin() + 1
        changed.add_(1)
        casts = [one.bfloat16() for one in (laid, flipped, laid[1], changed)]
        return first, *casts, laid.bfloat16(), whole.float(), whole.view(4, 3).float(), product.half()

    found = traced(function, torch.rand(4, 4))
    fused = fused_and_equal(function, torch.rand(4, 4))
    assert together(fused) == [4]  # one part of a weight is no weight
    x = torch.rand(4, 4)
    for one, other in zip(results(fused, x), results(found, x), strict=True):
        assert one.stride() == other.stride()


@pytest.mark.parametrize("lanes", [2, 4])
def test_on_lanes(lanes: int) -> None:
    """What is done together reads and writes what its parts did: the checker, and a run on threads.

    Each lane has one thread. So has the run it is compared with: the order of sums in oneDNN's bf16 weight gradients
    (AMX) depends on the number of threads.
    """
    torch.manual_seed(0)
    found = traced(step_of(models.small_resnet(), cast=True), *BATCH)
    fused = regions.fuse(found, uncompiled, ("cpu",))
    program = graph(fused.tasks)
    made = schedule(program, lanes_for(program, lanes))
    check(made)
    run = backend.thread_run(fused, backend.plan_of(made), lanes)
    call = torch_call.call(BATCH, {})
    assert backend.equal(backend.observed(fused, call, run), results(fused, *BATCH, threads=1)) == (True, 0.0)


def test_views_of_one_weight_are_in_no_circle() -> None:
    """One of them is taken by a product, which is in no region, and another is in the region before."""
    torch.manual_seed(0)
    weight = torch.rand(4, 4)

    def function(x: torch.Tensor) -> Any:
        y = (x * weight[0]).sin() + 1
        again = weight[0]
        return (y * again).cos(), torch.mv(x, again)

    fused_and_equal(function, torch.rand(4, 4))
