"""Other people's nets through `Trainer.fit`, beside a tuned eager loop, a CUDA graph by hand and `torch.compile`.

    python benchmarks/training_nets.py    every net (those of torchvision and transformers where installed)
    python benchmarks/training_nets.py --nets gpt,vgg16 --rows graph,compiled,manyhands
    python benchmarks/training_nets.py --tiny                        small sizes on any device: no figures to quote

The rows are those of `benchmarks/training.py`: bfloat16 autocast, images in channels_last, data on the GPU, fused SGD.
`manyhands` is `Trainer.fit` with its defaults. Inputs and labels are random, so the loss shows only that all rows
compute the same. A first epoch warms up; then the median of the other epochs, in milliseconds a step. Every row has a
process of its own; compilers' caches are filled before, many side by side.

Exits with 1 if a net is not at least 1.3 times as fast as eager, or if its loss is more than 5% from that of the first
row.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import apart
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
FILL_STEPS = 5
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


def measure_all(
    problem_of: Callable[[str], NetProblem], nets: list[str], rows: list[str], cache: Path
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each net, as processes measured them."""
    pairs = [(net, row) for net in nets for row in rows]

    def cache_of(pair: tuple[str, str]) -> Path:
        return cache / "-".join(pair)

    def fill(pair: tuple[str, str]) -> None:
        problem = problem_of(pair[0])
        few = slice(FILL_STEPS * problem.batch_size)
        small = replace(problem, images=problem.images[few], labels=problem.labels[few], epochs=2)
        training.measure_apart(pair[1], small, str(cache_of(pair)))

    def measure(pair: tuple[str, str], variables: Mapping[str, str]) -> dict[str, Any]:
        found = training.measure_apart(pair[1], problem_of(pair[0]), str(cache_of(pair)), variables)
        return {"row": pair[1], **found}

    apart.fill([pair for pair in pairs if "compiled" in pair[1] and not cache_of(pair).exists()], fill)
    measured = apart.by_turns(pairs, measure)
    for _ in nets:
        yield [next(measured)[1] for _ in rows]


def show(net: str, measured: list[dict[str, Any]], steps: int) -> bool:
    """Print the net's line. Whether it is fast enough, and right."""
    failed = [f"{row['row']}: FAILED, {row['failed']}" for row in measured if "failed" in row]
    by_row = {row["row"]: row for row in measured if "failed" not in row}
    cells = []
    for row, found in by_row.items():
        first, peak = found["epochs"][0], found["peak"] / 1e6
        cells.append(f"{row} {found['seconds'] / steps * 1e3:.3f} ms (first epoch {first:.1f} s, {peak:.0f} MB)")
    print(f"{net:15}" + "  ".join(cells))
    ours, others = by_row.get("manyhands"), {row: found for row, found in by_row.items() if row != "manyhands"}
    if ours is None or not others:
        print(f"{'':15}" + "; ".join([*failed, "nothing to compare"]), flush=True)
        return not failed
    ratios = {row: found["seconds"] / ours["seconds"] for row, found in others.items()}
    loss = next(iter(others.values()))["train_loss"]
    apart_by = abs(ours["train_loss"] - loss) / loss
    words = [f"{ratio:.2f}x {row}" for row, ratio in ratios.items()] + [f"losses {apart_by:.1%} apart"]
    print(f"{'':15}" + "; ".join([*words, *failed, *training.weak_rivals(list(by_row.values()))]), flush=True)
    return ratios.get("eager", WANTED) >= WANTED and apart_by < LOOSE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="", help="with commas between; all of them if left out")
    parser.add_argument("--rows", default="eager,graph,compiled,manyhands", help="with commas between: %(default)s")
    parser.add_argument("--epochs", type=int, default=4, help="timed epochs, after a first: %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="of an epoch: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU too")
    parser.add_argument("--cache", default=f"{tempfile.gettempdir()}/training-nets-caches", help="of compilers")
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
    steps = TINY_STEPS if flags.tiny else flags.steps

    def problem(net: str) -> NetProblem:
        return problem_of(net, known[net], device, steps, 1 + flags.epochs)

    measured = measure_all(problem, chosen, rows, Path(flags.cache))
    good = [show(net, found, steps) for net, found in zip(chosen, measured, strict=True)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
