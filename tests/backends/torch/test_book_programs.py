"""The programs of a textbook's chapters on GPUs, as they are written for two of them, on a machine that has none."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("two_gpus")


def gpu(i: int = 0) -> torch.device:
    return torch.device(f"cuda:{i}")


def all_gpus() -> list[torch.device]:
    return [gpu(i) for i in range(torch.cuda.device_count())]


# Training on several devices, from scratch


def lenet(X: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
    h1 = F.avg_pool2d(F.relu(F.conv2d(X, params[0], params[1])), (2, 2), (2, 2))
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, params[2], params[3])), (2, 2), (2, 2))
    h3 = F.relu(h2.reshape(h2.shape[0], -1) @ params[4] + params[5])
    return h3 @ params[6] + params[7]


def initial() -> list[torch.Tensor]:
    shapes = [(4, 1, 3, 3), (4,), (6, 4, 3, 3), (6,), (54, 16), (16,), (16, 10), (10,)]
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2 for shape in shapes]


def get_params(params: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    new_params = [p.to(device) for p in params]
    for p in new_params:
        p.requires_grad_()
    return new_params


def allreduce(data: list[torch.Tensor]) -> None:
    for i in range(1, len(data)):
        data[0][:] += data[i].to(data[0].device)
    for i in range(1, len(data)):
        data[i][:] = data[0].to(data[i].device)


def split_batch(
    X: torch.Tensor, y: torch.Tensor, devices: list[torch.device]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    return nn.parallel.scatter(X, devices), nn.parallel.scatter(y, devices)


def train_batch(
    X: torch.Tensor, y: torch.Tensor, device_params: list[list[torch.Tensor]], devices: list[torch.device], lr: float
) -> None:
    X_shards, y_shards = split_batch(X, y, devices)
    losses = [
        F.cross_entropy(lenet(X_shard, weights), y_shard, reduction="sum")
        for X_shard, y_shard, weights in zip(X_shards, y_shards, device_params, strict=True)
    ]
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        for i in range(len(device_params[0])):
            allreduce([weights[i].grad for weights in device_params])
    with torch.no_grad():
        for weights in device_params:
            for p in weights:
                p -= lr * p.grad / X.shape[0]
                p.grad.zero_()


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    for rows in (8, 8, 7):
        yield (
            torch.randn(rows, 1, 18, 18, generator=generator, dtype=torch.float64),
            torch.randint(10, (rows,), generator=generator),
        )


def test_a_loop_by_hand_trains_as_one_device_does() -> None:
    trained = []
    for devices in ([gpu(0)], all_gpus()):
        device_params = [get_params(initial(), device) for device in devices]
        for X, y in batches():
            train_batch(X, y, device_params, devices, 0.2)
            torch.cuda.synchronize()
        assert {p.device for p in device_params[-1]} == {devices[-1]}
        for p, q in zip(device_params[0], device_params[-1], strict=True):
            assert torch.equal(p.cpu(), q.cpu())
        trained.append(device_params[0])
    for alone, together, before in zip(*trained, initial(), strict=True):
        torch.testing.assert_close(alone, together, rtol=1e-12, atol=1e-12)
        assert not torch.equal(alone.detach().cpu(), before)


# Training on several devices, with DataParallel


def small() -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return nn.Sequential(*layers).double()


def test_data_parallel_equals_one_device() -> None:
    """Each replica normalises its own shard, so one device does the same shard by shard."""
    X, y = torch.randn(7, 1, 6, 6, dtype=torch.float64), torch.randint(3, (7,))
    one, many = small(), nn.DataParallel(small().cuda(), device_ids=[0, 1])
    statistics = copy.deepcopy(one)
    expected = torch.cat([one(part) for part in X.chunk(2)])
    F.cross_entropy(expected, y).backward()
    out = many(X.cuda())
    assert (out.device, out.shape) == (gpu(0), expected.shape)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-12, atol=1e-12)
    F.cross_entropy(out, y.cuda()).backward()
    for p, q in zip(many.module.parameters(), one.parameters(), strict=True):
        assert (p.device, p.grad.device) == (gpu(0), gpu(0))
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-12, atol=1e-12)
    statistics(X.chunk(2)[0])  # the first replica's statistics are the model's
    assert torch.equal(many.module[1].running_mean.cpu(), statistics[1].running_mean)
    one.eval(), many.eval()
    one.load_state_dict({name: value.cpu() for name, value in many.module.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(many(X).cpu(), one(X), rtol=1e-12, atol=1e-12)
