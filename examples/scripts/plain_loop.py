"""Data parallelism in a loop of your own: the verbs of placement, and tasks that run side by side. No trainer.

    python examples/scripts/plain_loop.py

Each device has a replica of the net. A step splits the batch, runs forward and backward passes on all devices at
once, adds the gradients up and updates every replica. It runs on all GPUs; with fewer than two, on two virtual
CPU devices.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from manyhands import torch as mh


def backward(net: nn.Module, X: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One device's part of a step: gradients of the *sum* of losses, so that parts of any size add up."""
    loss = cross_entropy(net(X), y, reduction="sum")
    loss.backward()
    return loss.detach()


def all_reduce(nets: list[nn.Module], samples: int) -> None:
    """Every replica gets the mean gradient of the whole batch."""
    for parameters in zip(*(net.parameters() for net in nets), strict=True):
        total = sum(mh.to(parameter.grad, parameters[0].device) for parameter in parameters) / samples
        for parameter in parameters:
            parameter.grad = mh.copy(total, parameter.device)


def train(devices: list[torch.device], epochs: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    X = torch.randn(600, 20)
    y = (X[:, :4].sum(1) > 0).long()
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    nets = [mh.to(copy.deepcopy(net), device) for device in devices]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for epoch in range(epochs):
        losses = []  # stay on their devices: no step waits for one
        for start in range(0, len(X), 60):
            shards = mh.split((X[start : start + 60], y[start : start + 60]), devices)
            for optimizer in optimizers:
                optimizer.zero_grad()
            with mh.parallel():
                tasks = [
                    mh.task(backward, writes=(net,))(net, X_shard, y_shard)
                    for net, (X_shard, y_shard) in zip(nets, shards, strict=True)
                ]
            losses += [task.result() for task in tasks]
            all_reduce(nets, 60)
            for optimizer in optimizers:
                optimizer.step()
        print(f"epoch {epoch + 1}: loss {sum(float(mh.to(loss, 'cpu')) for loss in losses) / len(X):.4f}")
    return nets


def main() -> None:
    if mh.num_gpus() < 2:
        mh.virtual_devices(2)
    several = train(mh.try_all_gpus())
    print("and the same on one device:")
    (one,) = train([mh.cpu()])
    pairs = zip(one.parameters(), mh.to(several[-1], "cpu").parameters(), strict=True)
    print("largest difference of a weight:", max(float((a - b).detach().abs().max()) for a, b in pairs))


if __name__ == "__main__":
    main()
