"""Casts of weights and counts of batches at once: the same bits, whoever asks for them in between."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from captured_step_cases import COUNT, eager_step, without_gpu
from lanes_cases import NoLanes, OnLanes, Recorded
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.book import torch as models
from manyhands.errors import UnsafeSchedule
from manyhands.schedule.check import check
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.batched_casts import BatchedCasts
from manyhands.training.torch.fast.build import captured_step
from manyhands.training.torch.fast.lanes.lanes import ForkedWork, StepLanes
from manyhands.training.torch.step.number_format import NumberFormat

X = torch.rand(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))


class Calls(TorchDispatchMode):
    """Counts the operations that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def passed(net: nn.Module, *modes: TorchDispatchMode, steps: int = 3) -> list[torch.Tensor]:
    """Losses, gradients and buffers of some steps, whose updates change the weights."""
    found: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for mode in modes:
            mode.__enter__()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(X).float().square().mean()
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        found += [buffer.clone() for buffer in net.buffers()]
    return found


def test_a_net_computes_the_same() -> None:
    net = models.initialise(models.small_resnet(), seed=0)
    batched, calls = BatchedCasts(), Calls()
    plain = passed(copy.deepcopy(net))
    for ours, theirs in zip(passed(net, calls, batched), plain, strict=True):
        assert torch.equal(ours, theirs)
    weights = [name for name, _ in net.named_parameters() if "norm" not in name and "bn" not in name]
    assert batched.counts["counts of batches"] == sum(isinstance(one, nn.BatchNorm2d) for one in net.modules())
    assert 15 < batched.counts["casts of weights"] <= len(weights)
    casts = calls.names.count("aten._to_copy.default")
    assert casts < 2 * batched.counts["casts of weights"]  # one each in the first step; later only those of activations
    assert calls.names.count("aten._foreach_copy_.default") == 2
    assert "casts of weights" in batched.explain()


class Asking(nn.Module):
    """Uses a norm twice and reads its count; changes a weight in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.first, self.second = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        assert self.norm.num_batches_tracked is not None
        self.seen.append(int(self.norm.num_batches_tracked))
        x = self.first(self.norm(x))
        with torch.no_grad():
            self.second.weight.mul_(1.5)
        return self.second(x)


def test_what_is_asked_for_in_between() -> None:
    torch.manual_seed(0)
    net = Asking()
    plain = copy.deepcopy(net)
    theirs = passed(plain)
    for ours, other in zip(passed(net, BatchedCasts()), theirs, strict=True):
        assert torch.equal(ours, other)
    assert net.seen == plain.seen == [1, 3, 5]


def test_other_additions_are_no_counts() -> None:
    count = torch.tensor(0)
    with BatchedCasts():
        count.add_(1, alpha=3)
        count.add_(2)
        count.add_(1)
    assert count == 6


def test_a_net_whose_weights_are_exchanged() -> None:
    """New parameters in the old places, and none any more: only those of the last pass are cast ahead."""
    batched = BatchedCasts()
    for _ in range(3):
        layer = nn.Linear(4, 4)
        for _ in range(2):
            with batched, torch.autocast("cpu", dtype=torch.bfloat16):
                ours = layer(torch.ones(2, 4))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(ours, functional.linear(torch.ones(2, 4), layer.weight, layer.bias))


class Scaled(nn.Module):
    """Operations on the batch come before the first cast; a weight may be written to before it is cast."""

    def __init__(self, written: str = "") -> None:
        super().__init__()
        self.first, self.second, self.written = nn.Linear(144, 3), nn.Linear(3, 3), written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1).exp().sin()
        if self.written:
            with torch.no_grad():
                self.get_submodule(self.written).weight.mul_(1.5)
        return self.second(self.first(x).cos())


@pytest.mark.parametrize("written", ["", "first", "second"])
def test_casts_begin_with_the_pass_on_a_side_lane(written: str) -> None:
    torch.manual_seed(0)
    net, lanes = Scaled(written), Recorded()
    plain = passed(copy.deepcopy(net))
    forked = ForkedWork(lanes)
    batched = BatchedCasts(forked)
    for ours, theirs in zip(passed(net, OnLanes(lanes), batched, steps=3), plain, strict=True):
        assert torch.equal(ours, theirs)
    assert lanes.log.count((1, "_foreach_copy_")) == 2  # in the first pass nothing is known yet
    last = lanes.log[len(lanes.log) - lanes.log[::-1].index((1, "_foreach_copy_")) - 1 :]
    until = last.index((0, "wait"))
    assert (0, "exp") in last[:until]
    assert {name for lane, name in last[1:] if lane} == {"mark"}
    # The main lane waits before the first use, and before it writes to what the side lane reads.
    assert last.index((0, "mul_") if written else (0, "addmm")) > until
    assert last.count((0, "_to_copy")) == (3 if written else 2)  # batch and answer; the weight is cast again
    assert "on a side lane" in batched.explain()
    assert forked.schedule is not None
    check(forked.schedule)
    with pytest.raises(UnsafeSchedule):
        check(replace(forked.schedule, waits={}))


def test_casts_are_allocated_on_the_main_lane_before_the_side_lane_forks_off() -> None:
    """Their memory belongs to the lane that allocates it."""
    lanes = Recorded()
    passed(Scaled(), OnLanes(lanes), BatchedCasts(ForkedWork(lanes)), steps=2)
    start = lanes.log.index((1, "wait"))
    assert lanes.log[start - 5 : start] == [(0, "empty_like")] * 4 + [(0, "mark")]
    assert {name for lane, name in lanes.log if lane == 1} == {"wait", "_foreach_copy_", "mark"}


@pytest.mark.parametrize("forgets", ["first", "second", ""])
def test_a_wait_that_is_forgotten_is_found(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts that are read too early; a weight that is written too early."""
    forked = ForkedWork(NoLanes())
    batched, net = BatchedCasts(forked), Scaled(forgets)
    passed(net, batched, steps=1)
    join = forked.join
    monkeypatch.setattr(forked, "join", lambda: None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batched.__enter__()
        net(X)
        monkeypatch.setattr(forked, "join", join)
        with pytest.raises(UnsafeSchedule, match="work on the side lane"):
            batched.__exit__(None, None, None)


@pytest.mark.parametrize("fails", [False, True])
def test_the_main_lane_waits_also_for_casts_that_nobody_asks_for(fails: bool) -> None:
    lanes, net = Recorded(), Scaled()
    batched = BatchedCasts(ForkedWork(lanes))
    passed(net, batched, steps=1)
    with pytest.raises(ValueError, match="no") if fails else torch.no_grad(), batched:
        X.exp()
        if fails:
            raise ValueError("no")
    assert lanes.log == [(0, "mark"), (1, "wait"), (1, "mark"), (0, "wait")]


def test_a_cast_that_fails_leaves_no_lane_behind() -> None:
    lanes, net = Recorded(), Scaled()
    forked = ForkedWork(lanes)

    def failing() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        forked.begin(failing, reads=[net.first.weight], writes=[torch.zeros(2)])
    assert lanes.log == [(0, "mark"), (1, "wait"), (1, "mark"), (0, "wait")]
    assert not forked.is_running


def test_the_fast_step_begins_with_the_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it gathers the batch."""
    without_gpu(monkeypatch)
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    images = torch.rand(COUNT, 144, generator=torch.Generator().manual_seed(0))
    data, lanes = Arrays((images, torch.arange(COUNT) % 3)), Recorded()
    for net in nets:
        eager = eager_step(net)
        eager.number_format = NumberFormat(autocast=torch.bfloat16)
        graph = captured_step(eager, data, 16, side_lanes=StepLanes(lanes) if net is nets[1] else False)
        graph.begin_epoch(torch.arange(COUNT), 0, 0)
        with OnLanes(lanes):
            for _ in range(3):
                lanes.log.append((0, "step"))
                assert graph(16), graph.ended
    step = lanes.log[len(lanes.log) - lanes.log[::-1].index((0, "step")) :]
    copied = step.index((1, "_foreach_copy_"))
    assert copied < step.index((0, "index_select")) < step.index((0, "wait"))
    assert "4 casts of weights; the casts on a side lane" in graph.explain()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_say_how_they_lie(channels: int) -> None:
    """Also those of one channel, whose memory is the same either way."""
    images = torch.rand(2, channels, 5, 7)
    laid = NumberFormat(channels_last=True).cast((images, torch.zeros(2)))[0]
    assert laid.stride() == (5 * 7 * channels, 1, 7 * channels, channels)
    assert torch.equal(laid, images)
    assert nn.Conv2d(channels, 4, 3)(laid).is_contiguous(memory_format=torch.channels_last)
