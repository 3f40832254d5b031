"""A traced PyTorch function placed on 2 and on 16 devices, and run there: each device has memory of its own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from graph_cases import traced
from torch import nn

from manyhands import torch as mh
from manyhands.backends.torch import planning
from manyhands.parallel.costs import costs
from manyhands.schedule.forecast import Forecast, Machine, forecast
from manyhands.schedule.graph import graph


class Devices:
    """Storages by memory and device; a value is a window on the storage of the device that asks for it."""

    def __init__(self, found: Any, inputs: list[torch.Tensor], count: int) -> None:
        self.found, self.sizes = found, planning.footprint(found).sizes
        self.storages: dict[tuple[int, int], torch.UntypedStorage] = {}
        self.windows: dict[Any, tuple[Any, ...]] = {}
        written = frozenset().union(*(step.task.writes for step in found.steps))
        constants = [(node, getattr(found.module, str(node.target))) for node in found.constants]
        for node, tensor in [*zip(found.inputs, inputs, strict=True), *constants]:
            memory = self.memory(node)
            for device in (0,) if memory in written else range(count):
                self.storages[memory, device] = tensor.detach().untyped_storage().clone()
            self.window(node, tensor)

    def memory(self, node: Any) -> int:
        (found,) = [memory for memory in self.found.storages[node] if memory in self.sizes]
        return int(found)

    def window(self, node: Any, tensor: torch.Tensor) -> None:
        self.windows[node] = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def value(self, node: Any, device: int) -> torch.Tensor:
        dtype, *window = self.windows[node]
        return torch.empty(0, dtype=dtype).set_(self.storages[self.memory(node), device], *window)

    def do(self, number: int, device: int) -> None:
        def there(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(there(one) for one in value)
            return self.value(value, device) if isinstance(value, torch.fx.Node) else value

        first, *parts = self.found.steps[number].nodes
        with torch.no_grad():
            result = first.target(*there(first.args), **{k: there(v) for k, v in first.kwargs.items()})
        for node, value in [(first, result), *((part, result[part.args[1]]) for part in parts)]:
            if isinstance(value, torch.Tensor):
                self.storages[self.memory(node), device] = value.untyped_storage()
                self.window(node, value)

    def copy(self, memory: int, source: int, target: int) -> None:
        self.storages[memory, target] = self.storages[memory, source].clone()


def run(found: Any, made: Forecast, inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """In a random order that lanes and waits allow."""
    devices, chance = Devices(found, inputs, made.machine.devices), random.Random(seed)
    queues, over = [lane[::-1] for lane in made.schedule.per_lane()], set()
    while any(queues):
        can = [q for q in queues if q and all(one in over for one in made.schedule.waits.get(q[-1], ()))]
        place = chance.choice(can).pop()
        if place in made.placed.copies:
            devices.copy(*made.placed.copies[place])
        else:
            number = made.placed.origin[place]
            devices.do(number, made.placed.device_of[number])
        over.add(place)
    return [devices.value(node, 0) for node in found.outputs]


@pytest.mark.parametrize("count", [2, 16])
def test_a_training_step_of_an_ensemble_on_devices(count: int) -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(4)]

    def step(x: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
        losses = [net(x).square().mean() for net in nets]
        gradients = torch.autograd.grad(torch.stack(losses).sum(), [p for net in nets for p in net.parameters()])
        total.add_(losses[0].detach())
        return [loss.detach() for loss in losses] + list(gradients) + [total * 1]

    x, total = torch.randn(6, 4), torch.zeros(1)
    found = traced(step, x, total)
    program = graph(costs(found, None).tasks)
    footprint = planning.footprint(found)
    made = forecast(program, footprint, Machine(count, bandwidth=1e12, latency=1e-8))
    assert len(set(made.placed.device_of.values())) > 1
    expected = step(x, total.clone())
    for seed in range(3):
        for one, other in zip(run(found, made, [x, total], seed), expected, strict=True):
            assert torch.equal(one, other)


def test_a_call_can_be_forecast() -> None:
    def chains(*xs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in xs:
            for _ in range(5):
                x = x @ x
            results.append(x)
        return results

    fast = mh.parallel(chains, synchronous=True)
    fast(*(torch.randn(64, 64) / 8 for _ in range(16)))
    one, two, many = (fast.forecast(count, lanes=1, bandwidth=1e12, latency=1e-7) for count in (1, 2, 16))
    assert one.speed_up == pytest.approx(1)
    assert 1.5 < two.speed_up <= 2.01
    assert two.speed_up < many.speed_up <= 16.1
    assert "16 devices of 1 lane, 1000 GB/s between them" in str(many)
