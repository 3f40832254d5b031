"""An update in two halves: the same weights and states to the bit, and the order of the lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lanes_cases import NoLanes, OnLanes, Recorded, loss_of, pair

from manyhands.training.torch.book import models
from manyhands.training.torch.fast.lanes.early import EarlyWork
from manyhands.training.torch.fast.lanes.update_halves import update_in_halves

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_are_those_of_a_step(name: str) -> None:
    nets = pair(models.lenet)
    optimizers = [OPTIMIZERS[name](net.parameters()) for net in nets]
    for _ in range(3):
        for net in nets:
            net.zero_grad()
            loss_of(net).backward()
        optimizers[0].step()
        assert update_in_halves(optimizers[1], EarlyWork(NoLanes()), worth=100)
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
    early = EarlyWork(lanes)
    with OnLanes(lanes):
        assert update_in_halves(optimizer, early, worth=100)
    updates = [lane for lane, name in lanes.log if name == "add_"]
    assert set(updates) == {0, 1}
    assert updates == sorted(updates, reverse=True)
    assert lanes.log[0] == (0, "mark")
    assert lanes.log[1] == (1, "wait")
    assert lanes.log[-2:] == [(1, "mark"), (0, "wait")]
    assert not early.is_running
    assert early.schedule is not None


def test_what_is_made_in_one_step() -> None:
    """Few numbers, other optimizers, hooks, two parameters in one memory, no gradients."""
    early = EarlyWork(NoLanes())

    def refused(optimizer: torch.optim.Optimizer, worth: int = 10) -> bool:
        before = [parameter.clone() for group in optimizer.param_groups for parameter in group["params"]]
        done = update_in_halves(optimizer, early, worth=worth)
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


def test_an_error_in_one_half_joins_the_lanes() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    net(torch.rand(2, 8)).sum().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    early = EarlyWork(NoLanes())
    gradients = [parameter.grad for parameter in net.parameters()]

    def fails() -> None:
        raise MemoryError

    optimizer.step = fails  # type: ignore[method-assign,assignment]
    with pytest.raises(MemoryError):
        update_in_halves(optimizer, early, worth=10)
    assert not early.is_running
    assert all(parameter.grad is gradient for parameter, gradient in zip(net.parameters(), gradients, strict=True))
