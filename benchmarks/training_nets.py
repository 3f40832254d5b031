"""Other people's nets through `Trainer.fit`, beside a tuned eager loop, a CUDA graph by hand and `torch.compile`.

    python benchmarks/training_nets.py    every net (those of torchvision and transformers where installed)
    python benchmarks/training_nets.py --nets gpt,vgg16 --rows eager,manyhands
    python benchmarks/training_nets.py --tiny                        small sizes on any device: no figures to quote

The rows are those of `benchmarks/training.py`: bfloat16 autocast, images in channels_last, data on the GPU, fused SGD.
`manyhands` is `Trainer.fit` with its defaults. Inputs and labels are random, so the loss shows only that all rows
compute the same. A first epoch warms up; then the median of the other epochs, in milliseconds a step.

Exits with 1 if a net is not at least 1.3 times as fast as eager, or if its loss is more than 5% from eager's.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peers
import suite_programs as suite
import torch
import training
import transformers_nets
from torch import nn

from manyhands import machine

WANTED = 1.3  # times the speed of eager
LOOSE = 0.05  # relative difference of losses: every row shuffles in its own way
TINY_STEPS = 3
CLASSES = 10


@dataclass(frozen=True)
class Net:
    """A net to train, and the shape of one of its inputs."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int = 128
    words: int = 0  # inputs are whole numbers below this
    classes: int = CLASSES


@dataclass
class NetProblem(peers.Problem):
    """One net with random inputs."""

    make: Callable[[], nn.Module] = field(kw_only=True)

    def net(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.make()

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class GroupNormNet(nn.Sequential):
    """Convolutions with GroupNorm, as small batches have them."""

    def __init__(self, width: int) -> None:
        layers: list[nn.Module] = []
        for before, after, stride in ((3, 1, 1), (1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1)):
            channels = before if before == 3 else before * width
            layers += [nn.Conv2d(channels, after * width, 3, stride, 1), nn.GroupNorm(8, after * width), nn.SiLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))


class CountsRecommender(suite.Recommender):
    """A recommender whose first 13 columns are counts, and the others the row of each table."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x[:, :13].float().log1p(), x[:, 13:])


class LibraryLstm(nn.Module):
    """PyTorch's own LSTM, which is one call of cuDNN."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, width, layers, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def nets(tiny: bool) -> dict[str, Net]:
    side, width = (32, 16) if tiny else (64, 256)
    image, batch = (3, side, side), 4 if tiny else 128
    words, tables = (50, 4) if tiny else (10_000, 26)
    own = {
        "group-norm": Net(lambda: GroupNormNet(8 if tiny else 64), image, batch),
        "unet": Net(lambda: suite.UNet(8 if tiny else 32), image, 4 if tiny else 32, classes=4),
        "gpt": Net(lambda: suite.Gpt(words, width, 2 if tiny else 8), (16 if tiny else 128,), 4 if tiny else 16, words),
        "lstm": Net(lambda: LibraryLstm(width, 2), (8 if tiny else 64, width), batch),
        "lstm-cells": Net(lambda: suite.Lstm(width, 2), (4 if tiny else 16, width), batch),
        "recommender": Net(
            *(lambda: CountsRecommender(tables, words, 8 if tiny else 64), (13 + tables,)),
            *(8 if tiny else 2048, words),
            classes=2,
        ),
        "mlp-ensemble": Net(lambda: suite.Ensemble(3 if tiny else 8, width, 4), (width,), batch),
        "experts": Net(lambda: suite.Experts(3 if tiny else 8, width), (width,), batch),
    }
    return {**own, **_torchvision(image, batch), **_transformers(tiny, image, batch)}


def _torchvision(image: tuple[int, int, int], batch: int) -> dict[str, Net]:
    if importlib.util.find_spec("torchvision") is None:
        return {}
    from torchvision import models

    def net(name: str, **options: Any) -> Net:
        return Net(lambda: getattr(models, name)(num_classes=CLASSES, **options), image, batch)

    return {
        "resnet50": net("resnet50"),
        "vgg16": net("vgg16"),
        "vgg11-bn": net("vgg11_bn"),
        "densenet121": net("densenet121"),
        "mobilenet-v3": net("mobilenet_v3_small"),
        "efficientnet-b0": net("efficientnet_b0"),
        "convnext-tiny": net("convnext_tiny"),
        "vit-b-16": net("vit_b_16", image_size=image[1]),
        "swin-t": net("swin_t"),
        "googlenet": net("googlenet", aux_logits=False, init_weights=False),
        "regnet-y-400mf": net("regnet_y_400mf"),
    }


def _transformers(tiny: bool, image: tuple[int, int, int], batch: int) -> dict[str, Net]:
    if not transformers_nets.installed():
        return {}
    words, length, lines = (100, 16, 4) if tiny else (30_000, 128, 32)
    make = transformers_nets.nets(tiny, words, image[1])
    return {
        "hf-bert": Net(make["hf-bert"], (length,), lines, words),
        "hf-gpt2": Net(make["hf-gpt2"], (length,), lines, words, classes=words),
        "hf-llama": Net(make["hf-llama"], (length,), lines, words, classes=words),
        "hf-vit": Net(make["hf-vit"], image, batch),
        "hf-convnext": Net(make["hf-convnext"], image, batch),
    }


def problem_of(name: str, net: Net, device: torch.device, steps: int, epochs: int) -> NetProblem:
    generator = torch.Generator().manual_seed(0)
    count = net.batch * steps
    if net.words:
        rows = torch.randint(net.words, (count, *net.shape), generator=generator)
    else:
        rows = torch.randn((count, *net.shape), generator=generator)
    labels = torch.randint(net.classes, (count,), generator=generator)
    tested = slice(net.batch)
    return NetProblem(
        name, rows, labels, rows[tested], labels[tested], device, net.batch, lr=1e-3, epochs=epochs, make=net.make
    )


def compare(problem: NetProblem, rows: list[str]) -> bool:
    """Print the net's line. Whether it is fast enough, and right."""
    steps = len(problem.images) // problem.batch_size
    measured, left_out = training.compare(rows, problem)
    by_row = {row["row"]: row for row in measured}
    if "eager" not in by_row or "manyhands" not in by_row:
        print(f"{problem.model}: {'; '.join(left_out) or 'nothing to compare'}", flush=True)
        return not left_out
    eager, ours = by_row["eager"], by_row["manyhands"]
    cells = []
    for row, figures in by_row.items():
        first, peak = figures["epochs"][0], figures["peak"] / 1e6
        cells.append(f"{row} {figures['seconds'] / steps * 1e3:.3f} ms (first epoch {first:.1f} s, {peak:.0f} MB)")
    ratio = eager["seconds"] / ours["seconds"]
    best = min(figures["seconds"] for row, figures in by_row.items() if row != "manyhands")
    apart = abs(ours["train_loss"] - eager["train_loss"]) / eager["train_loss"]
    print(f"{problem.model:15}" + "  ".join(cells))
    print(
        f"{'':15}{ratio:.2f}x eager",
        f"{best / ours['seconds']:.2f}x the best of the others",
        f"losses {apart:.1%} apart",
        *left_out,
        sep="; ",
        flush=True,
    )
    return ratio >= WANTED and apart < LOOSE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="", help="with commas between; all of them if left out")
    parser.add_argument("--rows", default="eager,graph,compiled,manyhands", help="with commas between: %(default)s")
    parser.add_argument("--epochs", type=int, default=4, help="timed epochs, after a first: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="of an epoch: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU too")
    flags = parser.parse_args()
    known, rows = nets(flags.tiny), flags.rows.split(",")
    chosen = flags.nets.split(",") if flags.nets else list(known)
    unknown = [name for name in chosen if name not in known] + [row for row in rows if row not in training.ROWS]
    if unknown:
        parser.error(f"there is no {unknown[0]}; nets: {', '.join(known)}; rows: {', '.join(training.ROWS)}")
    peers.hush()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    hardware = torch.cuda.get_device_name(0) if device.type == "cuda" else machine.host_name()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}; {datetime.date.today()}"
    print(f"{hardware}; {versions}{'; tiny: no figures to quote' if flags.tiny else ''}", flush=True)
    good, steps = [], TINY_STEPS if flags.tiny else flags.steps
    for name in chosen:
        good.append(compare(problem_of(name, known[name], device, steps, 1 + flags.epochs), rows))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
