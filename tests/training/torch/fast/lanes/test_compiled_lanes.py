"""Side lanes in a compiled backward pass: the pass over its graph, and what the operations in it do at run time."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lanes_cases import MODELS, NoLanes, assert_equal, gradients, loss_of, pair
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

from manyhands.book import torch as models
from manyhands.errors import UnsafeSchedule
from manyhands.schedule.check import check
from manyhands.training.torch.fast.lanes.compiled import CompiledLanes, MoveToSideLanes
from manyhands.training.torch.fast.lanes.eager import StepLanes

# What hooks do is the caller's, not in the compiled graph.
NAMES = [
    "lenet", "channels last", "shared weights", "all kinds of convolutions", "frozen weights", "autocast",
    "autocast, shared",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def with_pass(change: Callable[[GraphModule], None]) -> Any:
    """A compiler that compiles nothing: the graphs as they are, the backward one after the pass."""

    def backward(module: GraphModule, _: Any) -> Any:
        change(module)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=lambda module, _: make_boxed_func(module.forward), bw_compiler=backward)


def moved_to_lanes(module: GraphModule, max_held: int | None = None) -> None:
    MoveToSideLanes(max_held)(module.graph)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_equal_to_the_bit(name: str) -> None:
    plain, _ = pair(MODELS[name])
    torch.compile(loss_of, backend=with_pass(lambda module: None), dynamic=False)(plain).backward()
    for max_held in (None, 0, 1 << 20):
        torch._dynamo.reset()
        _, other = pair(MODELS[name])
        change = functools.partial(moved_to_lanes, max_held=max_held)
        loss = torch.compile(loss_of, backend=with_pass(change), dynamic=False)(other)
        lanes = NoLanes()
        with CompiledLanes(lanes, 2) as side:
            loss.backward()
        assert side.moved
        assert {lane for lane, _ in lanes.waits} == {0, 1, 2}
        assert_equal(gradients(plain), gradients(other))


def test_outside_of_lanes_it_is_computed_where_it_stands() -> None:
    plain, other = pair(models.lenet)
    loss_of(plain).backward()
    torch.compile(loss_of, backend=with_pass(moved_to_lanes), dynamic=False)(other).backward()
    assert_equal(gradients(plain), gradients(other))


@pytest.mark.parametrize(("max_held", "joins"), [(None, 1), (0, 10)])
def test_no_wait_is_missing(max_held: int | None, joins: int) -> None:
    change = functools.partial(moved_to_lanes, max_held=max_held)
    loss = torch.compile(loss_of, backend=with_pass(change), dynamic=False)(models.small_resnet())
    with CompiledLanes(NoLanes(), 2) as side:
        loss.backward()
    made = side.schedule
    # One more at the end, for what nobody joined: that is nothing.
    assert [task.name for task in made.graph.tasks].count("join") == joins + 1
    assert len(side.moved) == 10  # nine convolutions, one product
    for task, others in made.waits.items():
        for other in others:
            waits = {**made.waits, task: tuple(one for one in others if one != other)}
            if other == others[-1]:  # of the same lane an earlier wait may be implied
                with pytest.raises(UnsafeSchedule):
                    check(replace(made, waits=waits))


@pytest.mark.parametrize(("kept", "said"), [((0, 1), "1 of"), ((1, 0), "not joined")], ids=["memory", "a result"])
def test_a_join_that_leaves_something_out_is_found(kept: tuple[int, int], said: str) -> None:
    """Memory that the compiler may use again, or a result that is read too early."""

    def forgets(module: GraphModule) -> None:
        moved_to_lanes(module)
        join = next(node for node in module.graph.nodes if "join_lanes" in str(node.target))
        join.args = (join.args[0][kept[0] :], join.args[1][kept[1] :])

    loss = torch.compile(loss_of, backend=with_pass(forgets), dynamic=False)(models.lenet())
    with pytest.raises(UnsafeSchedule, match=said), CompiledLanes(NoLanes(), 2):
        loss.backward()


def test_what_somebody_waits_for_stays() -> None:
    """The gradient of a weight that is itself computed: its own backward needs it."""

    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, weight.sin()).square().sum()

    weight, x = torch.rand(2, 1, 3, 3, requires_grad=True), torch.rand(2, 1, 5, 5)
    compiled = torch.compile(loss, backend=with_pass(moved_to_lanes), dynamic=False)(weight, x)
    with CompiledLanes(NoLanes(), 2) as side:
        compiled.backward()
    assert not side.moved


@pytest.mark.long
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler")
def test_the_compiler_keeps_the_joins() -> None:
    """Through Inductor itself: with its own order of operations and its own use of memory."""

    def net() -> nn.Module:
        first = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), models.Residual(4, 4)]
        return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))

    plain, other = pair(net)
    torch.compile(loss_of, dynamic=False)(plain).backward()
    torch._dynamo.reset()
    step_lanes = StepLanes(NoLanes())
    loss = torch.compile(loss_of, dynamic=False, options={"post_grad_custom_post_pass": step_lanes.inductor_pass()})(
        other
    )
    with step_lanes.during_backward(3, compiled=True) as side:
        loss.backward()
    assert len(side.moved) == 4
    assert "3 x convolution, weight and bias" in "\n".join(step_lanes.explain(3))
    assert_equal(gradients(plain), gradients(other))
