"""Train a classifier on every process that torchrun or srun started; without a launcher, on this machine's devices.

Nothing in it says how many processes there are; only the last lines, which print once. Started again with the same
``--folder`` it goes on from the last checkpoint. README.md beside it has the commands.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

from manyhands import torch as mh


def spirals(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of three spirals, and the number of the spiral that each is on."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 3
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + 2.1 * label + 0.15 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.sin(), radius * angle.cos()], 1), label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/spirals", help="the folder of metrics and checkpoints")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=120, help="samples of a step, over all processes together")
    parser.add_argument("--devices", default="auto", help="default: all GPUs, else the CPU")
    options = parser.parse_args()

    torch.manual_seed(0)  # all processes make the same model; the first one's weights count
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    trainer = mh.Trainer(
        max_epochs=options.epochs,
        batch_size=options.batch_size,
        devices=options.devices,
        optimizer="adamw",
        lr=0.01,
        run=options.folder,
        resume="auto",
        checkpoints=mh.Checkpoints(every=50),
    )
    result = trainer.fit(model, spirals(3000, seed=1), spirals(600, seed=2))
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if rank == "0":
        print(result)


if __name__ == "__main__":
    main()
