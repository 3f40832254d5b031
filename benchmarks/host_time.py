"""What a step of several ranks costs the host, captured and plain: two ranks on one GPU, with Gloo.

    python benchmarks/host_time.py                   two ranks, ResNet-18 at batch 256
    python benchmarks/host_time.py --trace sums.json    and a profile of two steps of the first rank (Chrome's format)
    python benchmarks/host_time.py --draw sums.json sums.svg    one step of that profile, as a picture

NCCL refuses two ranks on one GPU, so sums go over the host with Gloo: of speed on several GPUs these figures say
nothing. The host's time of a step is given without its waits for the sums: medians of the last epoch's steps, in
milliseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from manyhands.schedule.timeline import Span, Timeline
from manyhands.training.torch.ranks import gradient_sum
from manyhands.training.torch.step.steps import RankSteps

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
    make, found = RankSteps.make, {}
    for name, optimize in (("plain", "off"), ("captured", "auto")):
        host: list[float] = []
        RankSteps.make = measured(make, host)  # type: ignore[method-assign]
        step: Any = mh.Step(optimize=optimize)
        trainer = mh.Trainer(
            epochs, devices=["gpu:0"], batch_size=BATCH, lr=0.01, precision="bf16", step=step, quiet=True
        )
        result = trainer.fit(book.initialise(book.resnet18(), 0), (images, labels))
        found[name] = statistics.median(host[-STEPS:]) * 1e3
        found[f"{name} ms/step"] = result.rows[-1]["seconds"] / STEPS * 1e3
        found[f"{name} loss"] = result.rows[-1]["train_loss"]
        found[f"{name} note"] = next((note for note in result.notes if "the step" in note), "plain")
    RankSteps.make = make  # type: ignore[method-assign]
    if trace is not None:
        write_trace(trace, images, labels)
    if dist.get_rank() == 0:
        found["ratio"] = found["captured"] / found["plain"]
        print(json.dumps(found, indent=1))


def write_trace(path: str, images: torch.Tensor, labels: torch.Tensor) -> None:
    """A profile of the last steps of a captured job."""
    make, number = RankSteps.make, 0
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

    RankSteps.make = traced  # type: ignore[method-assign]
    trainer = mh.Trainer(1, batch_size=BATCH, lr=0.01, precision="bf16", quiet=True)
    trainer.fit(book.initialise(book.resnet18(), 0), (images, labels))
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(path)


def draw(trace: str, path: str) -> None:
    """The first whole step of a profile: the graph of its passes, and what goes on beside it, a millisecond longer."""
    events = [event for event in json.loads(Path(trace).read_text())["traceEvents"] if event.get("ph") == "X"]
    graphs: dict[int, list[Any]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            graphs.setdefault(event["args"]["correlation"], []).append(event)
    kernels = next(kernels for kernels in graphs.values() if len(kernels) > 200)
    loss = next(event["ts"] for event in kernels if "nll" in event["name"].lower())
    begin, end = min(event["ts"] for event in kernels), max(event["ts"] for event in kernels) + 1e3
    shown = [("backward" if event["ts"] > loss else "forward", "graph of the passes", event) for event in kernels]
    for event in events:
        lane = next((lane for name, lane in _BESIDE.items() if event["name"].startswith(name)), None)
        if lane is not None and event.get("cat") != "gpu_user_annotation":
            shown.append(("copy", lane, event))
    spans = [
        Span(
            name, lane, (max(event["ts"], begin) - begin) * 1e-6, (min(event["ts"] + event["dur"], end) - begin) * 1e-6
        )
        for name, lane, event in shown
        if event["ts"] < end and event["ts"] + event["dur"] > begin
    ]
    spans = _merged(spans)
    Timeline(tuple(spans), "Gradients leave for their sums while the backward pass runs (two ranks, Gloo)").save(path)


def _merged(spans: list[Span]) -> list[Span]:
    """Neighbours that are alike as one, where less than 5 us are between them."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.lane, span.start)):
        if merged and (merged[-1].name, merged[-1].lane) == (span.name, span.lane):
            before = merged[-1]
            if span.start - before.stop < 5e-6:
                span = dataclasses.replace(before, stop=max(span.stop, before.stop))
                merged.pop()
        merged.append(span)
    return merged


_BESIDE = {"Memcpy DtoH": "gradients to the host, to be summed", "Memcpy HtoD": "sums to the GPU"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--trace")
    parser.add_argument("--draw", nargs=2, metavar=("TRACE", "PICTURE"))
    flags = parser.parse_args()
    if flags.draw:
        draw(*flags.draw)
        return 0
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
