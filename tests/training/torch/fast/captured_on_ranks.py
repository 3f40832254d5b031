"""Run by torchrun: jobs of two ranks with plain steps and with captured ones, and how far their results are apart."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
from captured_cases import trained
from cpu_recorder import CpuRecorder
from test_captured_jobs import SGD, Lengths, Sums, sequences
from torch import nn
from training_cases import CLASSES, Batches, Rows, WithNet, difference, mlp, vectors

from manyhands import torch as mh
from manyhands.training.options import Step
from manyhands.training.torch.ranks import gradient_sum
from manyhands.training.torch.step import steps

RANK = int(os.environ.get("RANK", "0"))


class WithUnused(WithNet):
    """A layer that is never used, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2).double()
        self.rarely = nn.Linear(CLASSES, CLASSES).double()

    def training_step(self, batch: Any) -> torch.Tensor:
        scores = self.net(batch["x"])
        scores = self.rarely(scores) if batch["rare"] else scores
        return nn.functional.cross_entropy(scores, batch["labels"])


def batches(sizes: list[int], *, dicts: bool = False) -> Batches:
    """Batches of these sizes; every third one is marked."""
    X, y = vectors(sum(sizes))
    pairs = enumerate(zip(X.split(sizes), y.split(sizes), strict=True))
    return Batches([{"x": x, "labels": y, "rare": n % 3 == 0} if dicts else (x, y) for n, (x, y) in pairs])


class Unfreeze(mh.Callback):
    """Trains the first layer in the first epoch, and from the third on."""

    def on_model(self, training: Any, model: Any) -> None:
        model[0].requires_grad_(training.epoch > 1)


SPOILT = vectors()[0].index_fill(0, torch.tensor([20]), torch.nan), vectors()[1]
JOBS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "arrays": (mlp, vectors, {}),
    "a data set, momentum": (mlp, Rows, {"optimizer": SGD}),
    "shares": (mlp, vectors, {"step": Step(shares=[0.7, 0.3])}),
    "clip and accumulation": (mlp, Rows, {"gradient_clip_val": 0.1, "step": Step(accumulate=2)}),
    "a sum and a count": (Sums, vectors, {}),
    "a batch that is left out": (mlp, lambda: SPOILT, {"step": Step(on_nan="continue"), "optimizer": SGD}),
    "a rank without samples": (mlp, lambda: batches([8, 8, 1] * 6), {"batch_size": None}),
    "unused parameters": (WithUnused, lambda: batches([16] * 12, dicts=True), {"optimizer": SGD}),
    "an average": (mlp, vectors, {"callbacks": [mh.EMA(0.9)]}),
    "unfreezing": (mlp, vectors, {"callbacks": [Unfreeze()], "optimizer": SGD, "batch_size": 8}),
    "lengths": (Lengths, lambda: sequences([5, 7] * 9), {"batch_size": 8}),
    "one rank plain": (mlp, vectors, {"optimizer": SGD}),
}


def main() -> None:
    gradient_sum._FIRST_BUCKET = gradient_sum._BUCKET = 256  # bytes: several buckets
    for name in sys.argv[1:] or JOBS:
        make, data, options = JOBS[name]
        net = make()
        plain, expected = trained(net, data(), **options)
        recorder = CpuRecorder()
        steps.recorder_for = lambda _: recorder if RANK == 0 or name != "one rank plain" else None  # noqa: B023
        try:
            captured, result = trained(net, data(), **options)
        finally:
            steps.recorder_for = lambda _: None
        pairs = zip(result.rows, expected.rows, strict=True)
        losses = [abs((row["train_loss"] or 0) - (other["train_loss"] or 0)) for row, other in pairs]
        found = {
            "job": name, "rank": RANK, "apart": max(difference(captured, plain), *losses), "replays": recorder.replays,
            "signals": recorder.started_after_signals, "notes": result.notes,
        }  # fmt: skip
        sys.stdout.write(f"{json.dumps(found)}\n")  # at once: both ranks write to the same place
        sys.stdout.flush()


if __name__ == "__main__":
    main()
