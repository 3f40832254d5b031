"""What the loops share: a net, data, and a clock that waits for the device before and after the steps that count."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from typing import Any

import torch

MARK = "measured: "
parser = argparse.ArgumentParser()
parser.add_argument("--cured", action="store_true")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--warmup", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=2048)
options = parser.parse_args()
cured: bool = options.cured
steps: int = options.warmup + options.steps
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.backends.cudnn.deterministic = True


def net() -> torch.nn.Module:
    """A convolutional net whose step takes a GPU about as long as the host needs to launch it."""
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
    images, labels = torch.randn(16 * size, 1, 28, 28), torch.randint(10, (16 * size,))
    if pinned and device.type == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()
    batches = [(images[i * size : (i + 1) * size], labels[i * size : (i + 1) * size]) for i in range(16)]
    data: Any = [batches[number % 16] for number in range(steps)]
    return torch.utils.data.DataLoader(data, batch_size=None)


class Clock:
    """Call it after each step."""

    def __init__(self) -> None:
        self._steps = 0
        self._begin = 0.0

    def __call__(self) -> None:
        self._steps += 1
        if self._steps == options.warmup:
            self._drain()
            self._begin = time.perf_counter()

    def report(self, model: torch.nn.Module) -> None:
        """Print the seconds of a step, and what the weights are in the end."""
        self._drain()
        seconds = (time.perf_counter() - self._begin) / (self._steps - options.warmup)
        data = b"".join(parameter.detach().float().cpu().numpy().tobytes() for parameter in model.parameters())
        print(MARK + json.dumps({"seconds": seconds, "weights": hashlib.sha256(data).hexdigest()}))

    @staticmethod
    def _drain() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()  # manyhands: wait-ok the clock
