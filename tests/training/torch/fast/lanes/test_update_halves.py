"""An update in two halves: the same weights and states to the bit, and the order of the lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lanes_cases import NoLanes, OnLanes, Recorded, loss_of, pair

from manyhands.training.torch.book import models
from manyhands.training.torch.fast.lanes.forked import ForkedWork
from manyhands.training.torch.fast.lanes.update_halves import update_in_halves

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True, amsgrad=True),
}


def step_and_halves(nets: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """One step of each: the first as it is, the second in halves."""
    for net in nets:
        net.zero_grad()
        loss_of(net).backward()
    optimizers[0].step()
    assert update_in_halves(optimizers[1], ForkedWork(NoLanes()), worth=100)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_are_those_of_a_step(name: str) -> None:
    nets = pair(models.lenet)
    optimizers = [OPTIMIZERS[name](net.parameters()) for net in nets]
    for _ in range(3):
        step_and_halves(nets, optimizers)
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][number][key]))
            for key, value in state.items()
            if value is not None
        )


def test_the_first_half_is_on_the_side_lane() -> None:
    lanes = Recorded()
    net = models.lenet()
    loss_of(net).backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    forked = ForkedWork(lanes)
    with OnLanes(lanes):
        assert update_in_halves(optimizer, forked, worth=100)
    updates = [lane for lane, name in lanes.log if name == "add_"]
    assert set(updates) == {0, 1}
    assert updates == sorted(updates, reverse=True)
    assert lanes.log[0] == (0, "mark")
    assert lanes.log[1] == (1, "wait")
    assert lanes.log[-2:] == [(1, "mark"), (0, "wait")]
    assert not forked.is_running


def test_a_scheduler_may_wrap_the_step() -> None:
    """It notes that there was a step; a step that somebody else has replaced is made as it is."""
    nets = pair(models.lenet)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    for _ in range(3):
        step_and_halves(nets, optimizers)
        for scheduler in schedulers:
            scheduler.step()
    assert all(map(torch.equal, *(net.parameters() for net in nets)))
    step = optimizers[1].step

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(nets[1].parameters(), 0.1)
        step()

    optimizers[1].step = clipped  # type: ignore[method-assign,assignment]
    assert not update_in_halves(optimizers[1], ForkedWork(NoLanes()), worth=100)


def test_states_in_one_memory_are_updated_in_one_step() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    net(torch.rand(2, 8)).sum().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    buffers = torch.zeros(2, 8, 8)
    for layer, buffer in zip(net, buffers, strict=True):
        optimizer.state[layer.weight]["momentum_buffer"] = buffer
    assert not update_in_halves(optimizer, ForkedWork(NoLanes()), worth=10)
    optimizer.state[net[0].weight]["momentum_buffer"] = buffers[0].clone()
    assert update_in_halves(optimizer, ForkedWork(NoLanes()), worth=10)


def test_what_is_made_in_one_step() -> None:
    """Few numbers, other optimizers, hooks, two parameters in one memory, no gradients."""
    forked = ForkedWork(NoLanes())

    def refused(optimizer: torch.optim.Optimizer, worth: int = 10) -> bool:
        before = [parameter.clone() for group in optimizer.param_groups for parameter in group["params"]]
        done = update_in_halves(optimizer, forked, worth=worth)
        after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert done or all(map(torch.equal, before, after))
        return not done

    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    assert refused(torch.optim.SGD(net.parameters(), lr=0.1))
    net(torch.rand(2, 8)).sum().backward()
    assert refused(torch.optim.SGD(net.parameters(), lr=0.1), worth=1000)
    assert refused(torch.optim.RMSprop(net.parameters(), lr=0.1))
    hooked = torch.optim.SGD(net.parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    assert refused(hooked)
    memory = torch.rand(2, 64)
    views = [torch.nn.Parameter(row) for row in memory]
    for view in views:
        view.grad = torch.rand(64)
    assert refused(torch.optim.SGD(views, lr=0.1))
    assert not refused(torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("half", [1, 2])
def test_an_error_in_one_half_joins_the_lanes(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    net(torch.rand(2, 8)).sum().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    forked = ForkedWork(NoLanes())
    gradients = [parameter.grad for parameter in net.parameters()]

    calls = []

    def fails(self: torch.optim.SGD) -> None:
        calls.append(self)
        if len(calls) == half:
            raise MemoryError

    monkeypatch.setattr(torch.optim.SGD, "step", fails)
    with pytest.raises(MemoryError):
        update_in_halves(optimizer, forked, worth=10)
    assert not forked.is_running
    assert all(parameter.grad is gradient for parameter, gradient in zip(net.parameters(), gradients, strict=True))
