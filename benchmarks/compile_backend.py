"""`torch.compile(model, backend="manyhands")` in a user's own training loop, beside eager PyTorch and Inductor.

    python benchmarks/compile_backend.py                  every net (torchvision's, where it is installed)
    python benchmarks/compile_backend.py --rows resnet18,mlps
    python benchmarks/compile_backend.py --first          only the first three steps, each way in a fresh process
    python benchmarks/compile_backend.py --tiny           small sizes on any device: a try, no figures to quote

The loop is the one that people write: bfloat16 autocast around the compiled model and the loss, `loss.backward()` and
`optimizer.step()` outside. All ways begin with the same weights and see the same batches; their losses are compared
first. Then they are timed in turns; a row shows the median milliseconds of a step, and what the first three steps took,
compilation and planning included. Exits with 1 if a row is slower than eager.

`--first` measures those first steps fairly: every net and way in a process of its own, with empty caches, `--jobs` of
them at the same time.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from manyhands import torch as mh
from manyhands.book import torch as models

ROUNDS, STEPS = 5, 20
LOOSE = 0.05  # relative difference of losses in bfloat16 after a few steps


class Ensemble(nn.Module):
    """Eight small nets side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())), nn.Linear(256, 10))
            for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(net(x) for net in self.nets) / len(self.nets)


def rows(tiny: bool) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """Each net and the shape of its batches."""
    batch = 4 if tiny else 64
    rows_by_name: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "mlps": (Ensemble, (batch, 256)),
        "resnet18": (lambda: models.resnet18(10, in_channels=3), (batch, 3, 32, 32)),
    }
    try:
        import torchvision
    except ImportError:
        return rows_by_name
    vision = torchvision.models
    rows_by_name["googlenet"] = (
        lambda: vision.googlenet(num_classes=10, aux_logits=False, init_weights=False),
        (batch, 3, 64, 64),
    )
    rows_by_name["mobilenet-v3"] = (lambda: vision.mobilenet_v3_small(num_classes=10), (batch, 3, 64, 64))
    rows_by_name["vit-b-16"] = (lambda: vision.vit_b_16(num_classes=10, image_size=64), (batch, 3, 64, 64))
    return rows_by_name


class Loop:
    """A model, its optimizer and a way to call it."""

    def __init__(
        self, net: nn.Module, make: Callable[[nn.Module], Callable[..., Any]], shape: tuple[int, ...], device: str
    ):
        self.net = copy.deepcopy(net).to(device).train()
        self.call, self.device = make(self.net), device
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(shape, generator=generator).to(device) for _ in range(4)]
        self.labels = [torch.randint(10, shape[:1], generator=generator).to(device) for _ in range(4)]

    def steps(self, count: int) -> list[torch.Tensor]:
        losses = []
        for number in range(count):
            x, y = self.batches[number % 4], self.labels[number % 4]
            self.optimizer.zero_grad()
            with torch.autocast(self.device, torch.bfloat16):
                loss = nn.functional.cross_entropy(self.call(x), y)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return losses


def seconds(run: Callable[[], Any], device: str) -> float:
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "eager": lambda net: net,
    "manyhands": lambda net: torch.compile(net, backend=mh.compile_backend),
    "lanes": lambda net: torch.compile(net, backend=mh.compile_backend, options={"fuse": False}),
    "inductor": lambda net: torch.compile(net, mode="reduce-overhead"),
}


def row(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], device: str, ways: list[str]) -> bool:
    torch.manual_seed(0)
    net = make()
    loops, first, losses = {}, {}, {}
    torch._dynamo.reset()  # once: it would take away what the way before has compiled
    for way in ways:
        loop = loops[way] = Loop(net, WAYS[way], shape, device)
        first[way] = seconds(lambda loop=loop, way=way: losses.__setitem__(way, loop.steps(3)), device)
    for way in ways:
        apart = (losses[way][1] - losses["eager"][1]).abs() / losses["eager"][1].abs()
        assert float(apart) < LOOSE, f"{name}: the losses of {way} differ by {float(apart):.1%}"
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            loops[way].steps(2)
            times[way].append(seconds(lambda way=way: loops[way].steps(STEPS), device) / STEPS)
    spent = {way: statistics.median(times[way]) for way in ways}
    figures = "  ".join(f"{way} {spent[way] * 1e3:7.3f} ms (first {first[way]:5.1f} s)" for way in ways)
    print(f"{name:14s} {figures}  {spent['eager'] / spent['manyhands']:.2f}x eager", flush=True)
    return spent["manyhands"] <= spent["eager"]


def first_steps(name: str, way: str, tiny: bool, device: str) -> float:
    """Seconds of `torch.compile` and a way's first three steps, after two eager steps that load what any program needs.

    `torch.compile` counts: it imports Inductor, which our backend does in the first step.
    """
    torch.manual_seed(0)
    make, shape = rows(tiny)[name]
    net = make()
    Loop(net, WAYS["eager"], shape, device).steps(2)
    return seconds(lambda: Loop(net, WAYS[way], shape, device).steps(3), device)


def compare_first_steps(chosen: list[str], ways: list[str], tiny: bool, jobs: int) -> None:
    """Print the seconds of the first three steps of each net and way, each in a fresh process."""

    def measured(name: str, way: str) -> float:
        with tempfile.TemporaryDirectory() as empty:
            caches = {"XDG_CACHE_HOME": empty, "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
            command = [sys.executable, __file__, "--rows", name, "--ways", way, "--first", "--jobs", "0"]
            answer = subprocess.run(
                command + ["--tiny"] * tiny,
                env=os.environ | caches | {"TRITON_CACHE_DIR": f"{empty}/triton"},
                text=True,
                stdout=subprocess.PIPE,
                check=True,
            )
        return float(answer.stdout.split()[-1])

    with ThreadPoolExecutor(jobs) as pool:
        answers = {name: {way: pool.submit(measured, name, way) for way in ways} for name in chosen}
    for name, by_way in answers.items():
        spent = {way: answer.result() for way, answer in by_way.items()}
        both = {"manyhands", "inductor"} <= spent.keys()
        ratio = f"  {spent['manyhands'] / spent['inductor']:.2f} of Inductor's" if both else ""
        print(f"{name:14s} " + "  ".join(f"{way} {spent[way]:5.1f} s" for way in ways) + ratio, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="")
    parser.add_argument("--ways", default="eager,manyhands,inductor")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--first", action="store_true", help="only the first three steps, each way in a fresh process")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, with --first; 0: in this process")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.first and not options.jobs:
        print(first_steps(options.rows, options.ways, options.tiny, device))
        return 0
    chosen = options.rows.split(",") if options.rows else list(rows(options.tiny))
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, batch of bfloat16"
    )
    if options.first:
        ways = [way for way in options.ways.split(",") if way != "eager"]
        compare_first_steps(chosen, ways, options.tiny, options.jobs)
        return 0
    good = [row(name, *rows(options.tiny)[name], device, options.ways.split(",")) for name in chosen]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
