"""The largest batch that fits: searched with real steps, bounded on a host, and nothing is changed by it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import manyhands.torch as mh
from manyhands.errors import BadSettings
from manyhands.training import batch_size_search


def data(count: int) -> Any:
    return torch.rand(count, 4), torch.randint(0, 2, (count,))


@pytest.mark.parametrize("limit", [1, 7, 8, 100, 777, 5000])
def test_the_search_ends_near_the_largest(limit: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    for devices in (1, 3):
        tried.clear()
        if limit < devices:
            with pytest.raises(BadSettings, match="not even a batch of"):
                batch_size_search.largest(fits, 1000, devices)
            continue
        found = batch_size_search.largest(fits, 1000, devices)
        assert min(limit, 1000) * 7 // 8 - devices < found <= limit
        assert len(tried) < 20


def test_nothing_is_changed() -> None:
    net, samples = torch.nn.Linear(4, 2), data(32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    before, drawn = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    trainer = mh.Trainer(devices=["cpu"], optimizer=optimizer, precision="fp32")
    assert trainer.find_batch_size(net, samples, maximum=32) == 32
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in net.parameters())


def test_several_devices_share_a_batch() -> None:
    """For more than 8 samples on one of them the loss needs more memory than there are addresses."""
    greedy = lambda output, _: (output * torch.ones(2**50 if len(output) > 8 else 1).sum()).mean()  # noqa: E731
    two = mh.Trainer(devices=["cpu"], workers=mh.Workers(per_device=2), lr=0.1, precision="fp32", loss=greedy)
    assert two.find_batch_size(torch.nn.Linear(4, 2), data(32), maximum=24) == 16


def test_micro_batches_and_what_is_refused() -> None:
    trainer, net = mh.Trainer(devices=["cpu"], lr=0.1, batch_size=64, precision="fp32"), torch.nn.Linear(4, 2)
    assert trainer.find_batch_size(net, data(200), of="micro_batch", maximum=16) == 16
    with pytest.raises(BadSettings, match="on a CPU, where no error says that memory is full: give maximum="):
        trainer.find_batch_size(net, data(8))
