"""A GAN: two nets, two optimizers, one trainer.

    python examples/scripts/gan.py --devices cpu:2 --plot gan.png

The generator learns to draw points of a ring. Each batch is an update of the critic, then one of the generator;
on several devices the gradients of each are summed over all of them.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from manyhands import torch as mh


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = mlp(4, 2), mlp(2, 1)

    def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            "critic": torch.optim.Adam(self.critic.parameters(), lr=2e-3, betas=(0.5, 0.9)),
            "generator": torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        }

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], optimizers: Any) -> None:
        real, noise = batch
        fake = self.generator(noise)
        optimizers["critic"].minimize(softplus(-self.critic(real)).mean() + softplus(self.critic(fake.detach())).mean())
        optimizers["generator"].minimize(softplus(-self.critic(fake)).mean())


def ring(count: int) -> torch.Tensor:
    angle = torch.rand(count) * 2 * math.pi
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


def plot(points: torch.Tensor, real: torch.Tensor, path: str) -> None:
    from matplotlib.figure import Figure

    axes = Figure(figsize=(4, 4), layout="constrained").add_subplot(aspect="equal")
    axes.scatter(*real.T, s=6, label="data")
    axes.scatter(*points.T, s=6, label="generator")
    axes.legend()
    axes.figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="auto", help="default: all GPUs, else the CPU")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--plot", metavar="FILE", help="draw the points of the generator")
    options = parser.parse_args()

    torch.manual_seed(0)
    model, real = GAN(), ring(2048)
    trainer = mh.Trainer(max_epochs=options.epochs, batch_size=128, devices=options.devices, quiet=True)
    result = trainer.fit(model, (real, torch.randn(2048, 4)))
    points = trainer.predict(model.generator, torch.randn(500, 4))
    print(result)
    print(f"mean distance from the ring: {float((points.norm(dim=1) - 1).abs().mean()):.3f}")
    if options.plot:
        plot(points, real[:500], options.plot)


if __name__ == "__main__":
    main()
