"""What a step of several ranks costs the host, captured and plain: two ranks on one GPU, with Gloo.

    python benchmarks/host_time.py                   two ranks, ResNet-18 at batch 256
    python benchmarks/host_time.py --trace sums.json    and a timeline of one step of the first rank (Chrome's format)

NCCL refuses two ranks on one GPU, so sums go over the host with Gloo: of speed on several GPUs these figures say
nothing. The host's time of a step is given without its waits for the sums: medians of the last epoch's steps, in
milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from manyhands import torch as mh
from manyhands.book import torch as book
from manyhands.training.torch.ranks import gradient_sum
from manyhands.training.torch.step.steps import Steps

BATCH, STEPS = 256, 40


class Watched:
    """A sum over the ranks, whose waiting is timed."""

    waited = 0.0

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        start = time.perf_counter()
        self._work.wait()
        Watched.waited += time.perf_counter() - start


def measured(call: Callable[..., Any], host: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        before, start = Watched.waited, time.perf_counter()
        result = call(*arguments)
        host.append(time.perf_counter() - start - (Watched.waited - before))
        return result

    return timed


def rank(epochs: int, trace: str | None) -> None:
    images, labels = torch.rand(BATCH * STEPS, 1, 28, 28), torch.randint(10, (BATCH * STEPS,))
    all_reduce = dist.all_reduce
    gradient_sum.dist.all_reduce = lambda *values, **options: Watched(all_reduce(*values, **options))  # type: ignore[assignment]
    make, found = Steps.make, {}
    for name, optimize in (("plain", "off"), ("captured", "auto")):
        host: list[float] = []
        Steps.make = measured(make, host)  # type: ignore[method-assign]
        step: Any = mh.Step(optimize=optimize)
        trainer = mh.Trainer(
            epochs, devices=["gpu:0"], batch_size=BATCH, lr=0.01, precision="bf16", step=step, quiet=True
        )
        result = trainer.fit(book.initialise(book.resnet18(), 0), (images, labels))
        found[name] = statistics.median(host[-STEPS:]) * 1e3
        found[f"{name} ms/step"] = result.rows[-1]["seconds"] / STEPS * 1e3
        found[f"{name} loss"] = result.rows[-1]["train_loss"]
        found[f"{name} note"] = next((note for note in result.notes if "the step" in note), "plain")
    Steps.make = make  # type: ignore[method-assign]
    if trace is not None:
        write_trace(trace, images, labels)
    if dist.get_rank() == 0:
        found["ratio"] = found["captured"] / found["plain"]
        print(json.dumps(found, indent=1))


def write_trace(path: str, images: torch.Tensor, labels: torch.Tensor) -> None:
    """A profile of the last steps of a captured job."""
    make, number = Steps.make, 0
    profiler = torch.profiler.profile()

    def traced(*arguments: Any) -> None:
        nonlocal number
        number += 1
        if number == STEPS - 4:
            profiler.start()
        make(*arguments)
        if number == STEPS - 2:
            torch.cuda.synchronize()
            profiler.stop()

    Steps.make = traced  # type: ignore[method-assign]
    trainer = mh.Trainer(1, batch_size=BATCH, lr=0.01, precision="bf16", quiet=True)
    trainer.fit(book.initialise(book.resnet18(), 0), (images, labels))
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--trace")
    flags = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        mh.Trainer._launched_device = lambda self: torch.device("cuda", 0)  # type: ignore[attr-defined,method-assign]
        rank(flags.epochs, flags.trace)
        dist.destroy_process_group()
        return 0
    if not torch.cuda.is_available():
        print("this measures ranks of a GPU, and there is none here")
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29577"]
    return subprocess.run([*command, str(Path(__file__)), *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
