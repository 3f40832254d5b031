"""Compares the predictor with real ranks on this machine's CPU: ``python benchmarks/predict_ranks.py [--model lenet]``.

Measures one device's step and the link between ranks (Gloo), predicts 1, 2 and 4 ranks, then trains with as many and
prints both. Run it on a quiet machine: predicted and real figures are measured one after the other.
"""

from __future__ import annotations

import argparse
import os

import torch

from manyhands import torch as mh
from manyhands.training.torch.predict import entry

STEPS, EPOCHS = 12, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small-resnet", help="default: small-resnet")
    parser.add_argument("--batch-size", type=int, default=128, help="over all ranks together; default: 128")
    options = parser.parse_args()
    model, batch = entry.example(options.model, options.batch_size)
    made = mh.predict(model, batch, devices=[1, 2, 4], link="measured", precision="fp32", device="cpu")
    print(made, "\n")
    print("| ranks | predicted | real | error | load |\n|---|---|---|---|---|")
    for row in made.rows:
        real = real_seconds(options.model, row.devices, batch)
        load = os.getloadavg()[0]
        print(
            f"| {row.devices} | {row.seconds * 1e3:.1f} ms | {real * 1e3:.1f} ms | {row.seconds / real - 1:+.1%} | "
            f"{load:.1f} |",
            flush=True,
        )


def real_seconds(name: str, ranks: int, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Seconds of a step of the trainer, in its best epoch after the first."""
    model, size = entry.example(name, 1)[0], len(batch[0])
    data = tuple(part.repeat(STEPS, *[1] * (part.dim() - 1)) for part in batch)
    trainer = mh.Trainer(
        EPOCHS, devices=["cpu"], workers=mh.Workers(per_device=ranks), batch_size=size, precision="fp32", quiet=True
    )
    rows = trainer.fit(model, data).rows
    return min(row["seconds"] for row in rows[1:]) / STEPS


if __name__ == "__main__":
    main()
