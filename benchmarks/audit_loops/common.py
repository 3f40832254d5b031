"""What the loops share: a net, data, and a clock that waits for the device before and after the steps that count."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from typing import Any

import torch

MARK = "measured: "
TURNS = "AUDIT_LOOPS_TURNS"  # in the environment: somebody says on stdin when to go on
REST = 5  # steps of the warm-up that are made when it is this program's turn
parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
parser.add_argument("--steps", type=int, default=160)
parser.add_argument("--block", type=int, default=20)
parser.add_argument("--warmup", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=4096)
options = parser.parse_args()
cured: bool = options.cured
steps: int = options.warmup + options.steps
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.backends.cudnn.deterministic = True


def net() -> torch.nn.Module:
    """A convolutional net; with a large batch its step takes a GPU longer than the host needs to launch it."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    channels = 1
    for width in (32, 64, 64, 128):
        layers += [torch.nn.Conv2d(channels, width, 3, padding=1), torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
        layers.append(torch.nn.MaxPool2d(2))
        channels = width
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(128, 10))


def loader(*, pinned: bool) -> torch.utils.data.DataLoader[Any]:
    """As many batches as there are steps, made and, on a GPU, pinned once: a loader would pin them in every step."""
    torch.manual_seed(1)
    size = options.batch_size
    images, labels = torch.randn(4 * size, 1, 28, 28), torch.randint(10, (4 * size,))
    if pinned and device.type == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()
    batches = [(images[i * size : (i + 1) * size], labels[i * size : (i + 1) * size]) for i in range(4)]
    data: Any = [batches[number % 4] for number in range(steps)]
    return torch.utils.data.DataLoader(data, batch_size=None)


class Clock:
    """Call it after each step: it times blocks of steps, the device drained before and after each.

    With ``AUDIT_LOOPS_TURNS=blocks`` or ``all`` in the environment, the program says that it is warm and waits for a
    line on stdin, once or before every block: so programs that have started together make their steps in turns.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._begin = 0.0
        self._times: list[float] = []
        self._turns = os.environ.get(TURNS)

    def __call__(self) -> None:
        self._steps += 1
        if self._steps == options.warmup - REST and self._turns is not None:
            self._wait()
        done = self._steps - options.warmup
        if done < 0 or done % options.block or self._turns == "all":
            return
        self._drain()
        if done:
            self._times.append((time.perf_counter() - self._begin) / options.block)
        if self._turns is not None and (done or self._steps == options.warmup):
            self._wait()
        self._begin = time.perf_counter()

    def _wait(self) -> None:
        """Say that it is somebody else's turn, and wait for one's own."""
        self._drain()
        print(f"\n{MARK}ready", flush=True)
        sys.stdin.readline()

    def report(self, model: torch.nn.Module) -> None:
        """Print the seconds of a step in each block, and what the weights are in the end."""
        self._drain()
        data = b"".join(parameter.detach().float().cpu().numpy().tobytes() for parameter in model.parameters())
        result = {"seconds": self._times, "weights": hashlib.sha256(data).hexdigest()}
        print(f"\n{MARK}{json.dumps(result)}", flush=True)

    @staticmethod
    def _drain() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()  # manyhands: wait-ok the clock
