"""Compares the predictor with real ranks on this machine's CPU: ``python benchmarks/predict_ranks.py [--model lenet]``.

Measures one device's step, how virtual CPU devices slow each other down, and the link between them (Gloo); predicts
1, 2 and 4 ranks, then trains with as many. Both are done several times in turns, so that a machine whose speed changes
slows both down. Run it on a quiet machine; the load is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics

import torch

from manyhands import machine
from manyhands import torch as mh
from manyhands.training.torch.predict import entry

RANKS, STEPS, EPOCHS = [1, 2, 4], 12, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small-resnet", help="default: small-resnet")
    parser.add_argument("--batch-size", type=int, default=128, help="over all ranks together; default: 128")
    parser.add_argument("--rounds", type=int, default=3, help="forecasts, each with its trainings; default: 3")
    options = parser.parse_args()
    model, batch = entry.example(options.model, options.batch_size)
    print(f"load before: {os.getloadavg()[0]:.1f}, cores: {machine.usable_cores()}, torch {torch.__version__}\n")
    errors: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for number in range(options.rounds):
        forecast = mh.predict(model, batch, devices=RANKS, link="measured", precision="fp32", device="cpu")
        if not number:
            print(forecast, "\n\n| round | ranks | predicted | of it lost | real | error |\n|---|---|---|---|---|---|")
        for row in forecast.rows:
            real = real_seconds(options.model, row.devices, batch)
            errors[row.devices].append(row.seconds / real - 1)
            lost = ", ".join(
                f"{term} {seconds * 1e3:.1f} ms" for term, seconds in row.terms.items() if abs(seconds) > 5e-5
            )
            print(
                f"| {number + 1} | {row.devices} | {row.seconds * 1e3:.1f} ms | {lost} | {real * 1e3:.1f} ms | "
                f"{errors[row.devices][-1]:+.1%} |",
                flush=True,
            )
    print("\n| ranks | error, median of the rounds | in each round |\n|---|---|---|")
    for ranks, seen in errors.items():
        print(f"| {ranks} | {statistics.median(seen):+.1%} | {', '.join(f'{error:+.1%}' for error in seen)} |")


def real_seconds(name: str, ranks: int, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Seconds of a step of the trainer: the median of its epochs after the first."""
    model, size = entry.example(name, 1)[0], len(batch[0])
    data = tuple(part.repeat(STEPS, *[1] * (part.dim() - 1)) for part in batch)
    trainer = mh.Trainer(
        EPOCHS, devices=["cpu"], workers=mh.Workers(per_device=ranks), batch_size=size, precision="fp32", quiet=True
    )
    rows = trainer.fit(model, data).rows
    return statistics.median(row["seconds"] for row in rows[1:]) / STEPS


if __name__ == "__main__":
    main()
