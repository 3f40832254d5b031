"""Weight gradients on side lanes: the same gradients to the bit, in a proved order, nothing held for too long.

There are no real lanes here: on a CPU an operation is over when its call returns. What is tested is what is issued to
which lane behind which marks; the checker proves that this order is enough.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lanes_cases import MODELS, NoLanes, assert_equal, gradients, loss_of, pair
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from manyhands.book import torch as models
from manyhands.errors import UnsafeSchedule
from manyhands.schedule.check import check
from manyhands.training.torch.fast.lanes.eager import SideLanes


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_equal_to_the_bit(name: str) -> None:
    plain, other = pair(MODELS[name])
    loss_of(plain).backward()
    lanes = NoLanes()
    with SideLanes(lanes, 2) as side:
        loss_of(other).backward()  # the forward pass inside too: it is left as it is
    assert side.moved
    assert lanes.waits
    assert_equal(gradients(plain), gradients(other))


@pytest.mark.parametrize("name", ["lenet", "shared weights", "autocast, shared", "hooks"])
def test_gradients_are_added_to_older_ones(name: str) -> None:
    plain, other = pair(MODELS[name])
    for net in (plain, other):
        loss_of(net, 2).backward()
    loss_of(plain).backward()
    loss = loss_of(other)
    places = [parameter.grad.data_ptr() for parameter in other.parameters() if parameter.grad is not None]
    with SideLanes(NoLanes(), 2):
        loss.backward()
    assert places == [parameter.grad.data_ptr() for parameter in other.parameters() if parameter.grad is not None]
    assert_equal(gradients(plain), gradients(other))


def backward(name: str, **options: Any) -> SideLanes:
    torch.manual_seed(0)
    net = MODELS[name]()
    loss = loss_of(net)
    with SideLanes(NoLanes(), 2, **options) as side:
        loss.backward()
    return side


def test_what_runs_on_side_lanes() -> None:
    assert len(backward("resnet-18").moved) == 20 + 2  # 20 convolutions; weight and bias of the last layer
    lenet = backward("lenet")
    assert lenet.moved.count("convolution, weight and bias") == 1
    assert lenet.moved.count("convolution, weight and bias (no gradient of the input)") == 1
    assert lenet.moved.count("product, weight") == lenet.moved.count("product, bias") == 3
    # Nothing that has a hook.
    hooked = backward("hooks").moved
    assert hooked.count("product, weight") == 2
    assert hooked.count("product, bias") == 2
    assert "convolution, weight and bias" not in hooked
    # A frozen weight has no gradient; the product of x @ x cannot be told.
    assert backward("frozen weights").moved.count("product, weight") == 2
    assert backward("all kinds of convolutions").moved.count("product, weight") == 1
    assert backward("embeddings").moved.count("embedding") == 4


def test_the_schedule_has_the_chain_on_the_main_lane() -> None:
    side = backward("lenet")
    check(side.schedule)
    names = [[side.schedule.graph.tasks[task].name for task in lane] for lane in side.schedule.per_lane()]
    assert "threshold_backward" in names[0]
    assert all(set(lane) <= {"mm", "sum", "convolution_backward"} for lane in names[1:])
    assert names[1]
    assert names[2]


@pytest.mark.parametrize("name", ["lenet", "shared weights", "autocast, shared"])
@pytest.mark.parametrize("max_held", [None, 4096])
def test_no_wait_is_superfluous_and_none_is_missing(name: str, max_held: int | None) -> None:
    """Take out any one wait of a side lane, or of the join: the checker objects."""
    made = backward(name, max_held=max_held).schedule
    needed = 0
    for task, others in made.waits.items():
        for other in others:
            waits = {**made.waits, task: tuple(one for one in others if one != other)}
            try:
                check(replace(made, waits=waits))
            except UnsafeSchedule:
                needed += 1
    assert needed >= 0.7 * made.wait_count()
    with pytest.raises(UnsafeSchedule):
        check(replace(made, waits={}))


def test_what_follows_goes_to_the_gradients_lane() -> None:
    made = backward("autocast").schedule
    casts = [i for i, task in enumerate(made.graph.tasks) if task.name == "_to_copy"]
    assert [made.lane_of[task] for task in casts].count(0) < len(casts) / 2


def test_gradients_are_taken_over_and_not_copied() -> None:
    made = backward("resnet-18").schedule
    assert "clone" not in {task.name for task in made.graph.tasks}


def test_memory_is_held_until_the_join_or_to_the_limit() -> None:
    """An activation that a side lane reads lives on when autograd is through with it."""

    def alive_at_the_end(max_held: int | None) -> list[bool]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(6)))
        first = torch.rand(64, 64, requires_grad=True)
        alive: list[bool] = []
        first.register_hook(lambda _: alive.extend(_is_alive(one) for one in handles))
        loss = net(first).sum()
        handles = _inputs_of_layers(loss)
        with SideLanes(NoLanes(), 1, max_held=max_held):
            loss.backward()
        assert not any(_is_alive(one) for one in handles)
        return alive

    assert alive_at_the_end(None) == [True] * 5
    assert alive_at_the_end(3 * 64 * 64 * 4).count(True) <= 2


def _inputs_of_layers(tensor: torch.Tensor) -> list[Any]:
    """Weak references to what layers but the first have got."""
    found, node = [], tensor.grad_fn
    while node is not None:
        if node.name() == "ReluBackward0":
            found.append(StorageWeakRef(node._saved_result.untyped_storage()))
        node = node.next_functions[0][0] if node.next_functions else None
    return found[1:]


def _is_alive(handle: Any) -> bool:
    return not handle.expired()


def test_the_main_lane_waits_before_it_writes_what_a_side_lane_reads() -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.mul_(2)  # in place: the side lane may still be reading what came in

    torch.manual_seed(0)
    layer, x, factors = nn.Linear(4, 4), torch.rand(4, 4, requires_grad=True), torch.rand(4, 4)
    doubled = Doubles.apply(x)
    loss = ((doubled + layer(x)) * factors).sum()  # the layer's backward comes first, and both get one gradient
    with SideLanes(NoLanes(), 1) as side:
        loss.backward()
    made = side.schedule
    writer = next(number for number, task in enumerate(made.graph.tasks) if task.name == "mul_")
    assert made.lane_of[writer] == 0
    assert made.waits[writer]
    with pytest.raises(UnsafeSchedule, match="mul_"):
        check(replace(made, waits={task: others for task, others in made.waits.items() if task != writer}))


def test_an_error_in_the_backward_pass_joins_and_surfaces() -> None:
    net = models.lenet()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("no")

    x = torch.rand(2, 1, 28, 28, requires_grad=True)
    x.register_hook(fail)
    loss = net(x).sum()
    lanes = NoLanes()
    with pytest.raises(ValueError, match="no"), SideLanes(lanes, 2):
        loss.backward()
    assert {lane for lane, _ in lanes.waits[-2:]} == {0}
    assert lanes.current == 0


def test_a_wrong_schedule_is_refused() -> None:
    """A lane that is not put behind the main one: the gradients may be anything, and that is found."""

    class Careless(SideLanes):
        def _behind_main(self, lane: int) -> None:
            pass

    loss = loss_of(models.mlp())
    with pytest.raises(UnsafeSchedule, match="mm"), Careless(NoLanes(), 2):
        loss.backward()
