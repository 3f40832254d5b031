"""Training nets of several branches on one GPU: the step as a plan of `parallel` against the captured one.

    python benchmarks/planned_step.py                    every row
    python benchmarks/planned_step.py --rows towers,googlenet-28
    python benchmarks/planned_step.py --ways captured,planned
    python benchmarks/planned_step.py --tiny             small sizes on any device: a try, no figures to quote

Each row trains the same net on the same made-up images three times: step by step (`fast=False`), with the captured
step (one CUDA graph, weight gradients beside the backward pass; `parallel=False`) and with `parallel=True`. Seconds
are the median of the epochs after the first, in which graphs are captured and plans are made and tried; what the first
one takes longer is printed. The weights at the end have to be the same, to the bit, for the last two; how far they are
from those of plain steps is printed.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from manyhands import machine
from manyhands import torch as mh
from manyhands.training.options import Step

EPOCHS = 4
WAYS: dict[str, dict[str, Any]] = {
    "plain steps": {"step": Step(fast=False)},
    "captured": {"step": Step(compile=False, parallel=False, tuned_convolutions=False)},
    "planned": {"step": Step(compile=False, parallel=True)},
}


class Inception(nn.Module):
    """Four ways side by side, put together again; widths as in GoogLeNet (Szegedy and others, 2014)."""

    def __init__(self, channels: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, one, 1)
        self.before_three, self.three = nn.Conv2d(channels, three[0], 1), nn.Conv2d(*three, 3, padding=1)
        self.before_five, self.five = nn.Conv2d(channels, five[0], 1), nn.Conv2d(*five, 5, padding=2)
        self.pooled = nn.Conv2d(channels, pooled, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ways = (
            self.one(x),
            self.three(self.before_three(x).relu()),
            self.five(self.before_five(x).relu()),
            self.pooled(functional.max_pool2d(x, 3, 1, 1)),
        )
        return torch.cat([way.relu() for way in ways], 1)


def googlenet() -> nn.Module:
    def halved() -> nn.Module:
        return nn.MaxPool2d(3, 2, 1)

    return nn.Sequential(
        *(nn.Conv2d(1, 64, 7, 2, 3), nn.ReLU(), halved()),
        *(nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(), halved()),
        *(Inception(192, 64, (96, 128), (16, 32), 32), Inception(256, 128, (128, 192), (32, 96), 64), halved()),
        *(Inception(480, 192, (96, 208), (16, 48), 64), Inception(512, 160, (112, 224), (24, 64), 64)),
        *(Inception(512, 128, (128, 256), (24, 64), 64), Inception(512, 112, (144, 288), (32, 64), 64)),
        *(Inception(528, 256, (160, 320), (32, 128), 128), halved()),
        *(Inception(832, 256, (160, 320), (32, 128), 128), Inception(832, 384, (192, 384), (48, 128), 128)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 10)),
    )


class Towers(nn.Module):
    """Four nets that see the same images, and whose scores are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                *(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.1)),
                *(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)),
            )
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([tower(x) for tower in self.towers]).mean(0)


class Transformer(nn.Module):
    """An image's rows are its words; queries, keys and values are products side by side."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(28, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{name: nn.Linear(width, width) for name in ("query", "key", "value", "together")},
                    **{"norm": nn.LayerNorm(width), "norm_too": nn.LayerNorm(width)},
                    **{"wide": nn.Linear(width, 4 * width), "narrow": nn.Linear(4 * width, width)},
                }
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x[:, 0])
        for block in self.blocks:
            y = block["norm"](x)
            heads = [block[n](y).unflatten(-1, (4, -1)).transpose(1, 2) for n in ("query", "key", "value")]
            seen = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            x = x + block["together"](seen)
            x = x + block["narrow"](functional.gelu(block["wide"](block["norm_too"](x))))
        return self.last(x.mean(1))


# For each row: the net, the size of its images, samples of a batch, and steps of an epoch.
ROWS: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "towers": (Towers, 28, 256, 1000),
    "googlenet-28": (googlenet, 28, 256, 200),
    "googlenet-96": (googlenet, 96, 128, 150),
    "transformer": (Transformer, 28, 128, 400),
}


def measure(name: str, ways: list[str], device: str, tiny: bool) -> None:
    make, side, batch, steps = ROWS[name]
    batch, steps = (4, 3) if tiny else (batch, steps)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch * steps, 1, side, side, generator=generator)
    labels = torch.randint(10, (batch * steps,), generator=generator)
    weights: dict[str, list[torch.Tensor]] = {}
    seconds: dict[str, float] = {}
    print(f"{name}: batch {batch}")
    for way in ways:
        torch.manual_seed(0)
        net = make()
        how: Any = {"devices": [device], "batch_size": batch, "lr": 0.01, "quiet": True, **WAYS[way]}
        result = mh.Trainer(2 if tiny else EPOCHS, **how).fit(net, (images, labels))
        first, *timed = (row["seconds"] for row in result.rows)
        seconds[way] = statistics.median(timed)
        weights[way] = [parameter.detach().cpu() for parameter in net.parameters()]
        notes = [note for note in result.notes if "step" in note and "one CUDA graph" not in note]
        more = f"the first epoch {first - seconds[way]:5.1f} s more"
        print(f"  {way:<12}{seconds[way] / steps * 1e3:9.3f} ms a step, {more}", *notes, sep="\n    ", flush=True)
    for way in ways:
        if way == "planned" or "planned" not in ways:
            continue
        pairs = zip(weights["planned"], weights[way], strict=True)
        apart = max(float((weight - other).norm() / other.norm()) for weight, other in pairs)
        same = "to the bit" if all(map(torch.equal, weights["planned"], weights[way])) else f"to {apart:.0e}"
        print(f"  planned is {seconds[way] / seconds['planned']:.2f}x {way}, equal {same}", flush=True)
        if way == "captured" and same != "to the bit":
            sys.exit("that is a fault")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="with commas between; all of them: %(default)s")
    parser.add_argument("--ways", default=",".join(WAYS), help="with commas between")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU too")
    flags = parser.parse_args()
    rows, ways = flags.rows.split(","), flags.ways.split(",")
    unknown = [name for name in rows if name not in ROWS] + [name for name in ways if name not in WAYS]
    if unknown or not (flags.tiny or torch.cuda.is_available()):
        parser.error(f"there is no {unknown[0]}" if unknown else "it is for a GPU; --tiny is a try anywhere")
    hardware = torch.cuda.get_device_name(0) if torch.cuda.is_available() else machine.host_name()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}; {datetime.date.today()}"
    print(f"{hardware}; {versions}{'; tiny: no figures to quote' if flags.tiny else ''}")
    for name in rows:
        measure(name, ways, "gpu:0" if torch.cuda.is_available() else "cpu", flags.tiny)


if __name__ == "__main__":
    main()
