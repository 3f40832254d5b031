"""Weight gradients on side lanes: the same gradients to the bit, in a proved order, nothing held for too long.

There are no real lanes here: on a CPU an operation is over when its call returns. What is tested is what is issued to
which lane behind which marks; the checker proves that this order is enough.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from manyhands.engine.check import check
from manyhands.errors import UnsafeSchedule
from manyhands.training.torch import models
from manyhands.training.torch.side_lanes import SideLanes


class NoLanes:
    """What a host without streams offers: everything is over at once. It counts what it is asked for."""

    def __init__(self) -> None:
        self.marks = 0
        self.waits: list[tuple[int, int]] = []
        self.current = 0

    def mark(self, lane: int) -> int:
        self.marks += 1
        return self.marks

    def wait(self, lane: int, mark: int) -> None:
        assert 0 < mark <= self.marks
        self.waits.append((lane, mark))

    @contextlib.contextmanager
    def on(self, lane: int) -> Any:
        self.current, before = lane, self.current
        yield
        self.current = before


class Shared(nn.Module):
    """One linear layer used twice, a convolution used twice, a weight that is a weight of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.first, self.twice, self.tied = nn.Conv2d(1, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.twice.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.conv(self.first(x)).relu()).mean((2, 3))
        return self.tied(self.twice(self.twice(x).relu()).relu())


class Together(nn.Module):
    """Grouped, strided, dilated, transposed, one-dimensional; a linear layer on three dimensions; x @ x."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 8, 3, groups=4, bias=False),
            nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 2, 1, dilation=1, stride=2),
        )  # fmt: skip
        self.line, self.out = nn.Conv1d(2, 3, 3, padding=2, dilation=2), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.line(self.net(x).flatten(2))
        y = self.out(y.transpose(1, 2)).mean(1)
        square = y.t() @ y
        return y @ (square @ square)


def _frozen() -> nn.Module:
    net = models.lenet()
    net[0].weight.requires_grad_(False)
    net[7].bias.requires_grad_(False)
    net[9].weight.requires_grad_(False)
    return net


def _hooked() -> nn.Module:
    net = models.lenet()
    net[3].weight.register_hook(lambda gradient: gradient * 2)
    net[7].weight.register_post_accumulate_grad_hook(_tripled)
    net[9].bias.register_hook(lambda gradient: gradient + 1)
    return net


def _tripled(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(3)


def _autocast(net: nn.Module) -> nn.Module:
    inner = net.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(x)

    net.forward = forward  # type: ignore[method-assign]
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": models.mlp,
    "lenet": models.lenet,
    "small resnet": models.small_resnet,
    "resnet-18": models.resnet18,
    "channels last": lambda: models.small_resnet().to(memory_format=torch.channels_last),
    "shared weights": Shared,
    "all kinds of convolutions": Together,
    "frozen weights": _frozen,
    "hooks": _hooked,
    "autocast": lambda: _autocast(models.lenet()),
    "autocast, shared": lambda: _autocast(Shared()),
}


def loss_of(net: nn.Module, size: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(size, 1, 28, 28, generator=generator)
    answer = net(x).float()
    return nn.functional.cross_entropy(answer, torch.arange(size) % answer.shape[1])


def gradients(net: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in net.named_parameters(remove_duplicate=False)}


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    other = make()
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    return plain, other


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, gradient in one.items():
        mine = other[name]
        assert (gradient is None) == (mine is None), name
        if gradient is not None:
            assert torch.equal(gradient, mine), name
            assert gradient.stride() == mine.stride(), name


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_equal_to_the_bit(name: str) -> None:
    plain, other = pair(MODELS[name])
    loss_of(plain).backward()
    lanes = NoLanes()
    with SideLanes(lanes, 2) as side:
        loss_of(other).backward()  # the forward pass inside too: it is left as it is
    assert side.aside
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


def test_what_goes_aside() -> None:
    assert len(backward("resnet-18").aside) == 20 + 2  # 20 convolutions; weight and bias of the last layer
    lenet = backward("lenet")
    assert lenet.aside.count("convolution, weight and bias") == 1
    assert lenet.aside.count("convolution, weight and bias (no gradient of the input)") == 1
    assert lenet.aside.count("product, weight") == lenet.aside.count("product, bias") == 3
    # Nothing that has a hook.
    hooked = backward("hooks").aside
    assert hooked.count("product, weight") == 2
    assert hooked.count("product, bias") == 2
    assert "convolution, weight and bias" not in hooked
    # A frozen weight has no gradient; the product of x @ x cannot be told.
    assert backward("frozen weights").aside.count("product, weight") == 2
    assert backward("all kinds of convolutions").aside.count("product, weight") == 1


def test_the_schedule_has_the_chain_on_the_main_lane() -> None:
    side = backward("lenet")
    assert side.schedule is not None
    check(side.schedule)
    names = [[side.schedule.graph.tasks[task].name for task in lane] for lane in side.schedule.per_lane()]
    assert "threshold_backward" in names[0]
    assert all(set(lane) <= {"mm", "sum", "convolution_backward"} for lane in names[1:])
    assert names[1]
    assert names[2]


@pytest.mark.parametrize("name", ["lenet", "shared weights", "autocast, shared"])
@pytest.mark.parametrize("most_held", [None, 4096])
def test_no_wait_is_superfluous_and_none_is_missing(name: str, most_held: int | None) -> None:
    """Take out any one wait of a side lane, or of the join: the checker objects."""
    made = backward(name, most_held=most_held).schedule
    assert made is not None
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
    assert made is not None
    casts = [i for i, task in enumerate(made.graph.tasks) if task.name == "_to_copy"]
    assert [made.lane_of[task] for task in casts].count(0) < len(casts) / 2


def test_gradients_are_taken_over_and_not_copied() -> None:
    made = backward("resnet-18").schedule
    assert made is not None
    assert "clone" not in {task.name for task in made.graph.tasks}


def test_memory_is_held_until_the_join_or_to_the_limit() -> None:
    """An activation that a side lane reads lives on when autograd is through with it."""

    def alive_at_the_end(most_held: int | None) -> list[bool]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(6)))
        first = torch.rand(64, 64, requires_grad=True)
        alive: list[bool] = []
        first.register_hook(lambda _: alive.extend(_is_alive(one) for one in handles))
        loss = net(first).sum()
        handles = _inputs_of_layers(loss)
        with SideLanes(NoLanes(), 1, most_held=most_held):
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
    assert made is not None
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


def test_ten_steps_are_equal_to_the_bit() -> None:
    plain, other = pair(models.small_resnet)
    for net in (plain, other):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(10):
            optimizer.zero_grad()
            loss = loss_of(net)
            with SideLanes(NoLanes(), 2) if net is other else contextlib.nullcontext():
                loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    assert_equal(plain.state_dict(), other.state_dict())
