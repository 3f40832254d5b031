"""Seconds per epoch of ResNet-18 on Fashion-MNIST: manyhands and its peers, in the same run.

    python benchmarks/training.py                                  every row, on the GPU if there is one
    python benchmarks/training.py --rows eager,manyhands           some of them
    python benchmarks/training.py --model lenet --samples 4096 --epochs 2      a try on a CPU
    python benchmarks/training.py --accuracy                       ten epochs with a one-cycle schedule
    python benchmarks/training.py --cpu-scaling                    two cores: by hand, one rank, two ranks

A first epoch warms up and counts apart; then the median of ``--epochs`` epochs, each ended by a synchronisation of the
device. Same initial weights, learning rate and number of samples in every row. The training loss (mean over the
last epoch) and the test accuracy (float32, the same code for all rows) show whether what was fast was also right.

Every row has a process of its own and an empty cache for compilers: what one row compiles, or uses up of Dynamo, is no
other row's gain or loss. A row that is not faster than the weaker form of itself is named, because it may be broken.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import apart
import cloudpickle
import peers
import torch
from peers import Outcome, Problem

from manyhands import machine
from manyhands.training.data import fashion_mnist
from manyhands.training.options import Step, Workers
from manyhands.training.schedules import one_cycle
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast import build
from manyhands.training.torch.trainer import Trainer

FRAMEWORKS = ("book", "lightning", "lightning-bf16", "accelerate", "accelerate-bf16")
SCALING = (("lenet", 256, 32), ("resnet18", 64, 6))  # model, batch, steps


# --- manyhands


def trainer_for(problem: Problem, **options: Any) -> Trainer:
    device = "gpu:0" if problem.device.type == "cuda" else "cpu"
    defaults = {"max_epochs": problem.epochs, "devices": [device], "batch_size": problem.batch_size, "lr": problem.lr}
    return Trainer(**{**defaults, "seed": problem.seed, "quiet": True, **options})


def arrays(problem: Problem) -> Arrays:
    """The rows as they are in memory; on the device each batch becomes what the net gets."""
    return Arrays((problem.images, problem.labels), lambda batch: (problem.inputs(batch[0]), batch[1].long()))


def manyhands(problem: Problem, *, without: str = "", **options: Any) -> Outcome:
    """``without``: an extension of the captured step."""
    net = problem.net()
    with build.without(without):
        result = trainer_for(problem, **options).fit(net, arrays(problem))
    seconds = [row["seconds"] for row in result.rows]
    return Outcome(net, seconds, [row["train_loss"] for row in result.rows], result.notes)


ROWS: dict[str, Callable[[Problem], Outcome]] = {
    **peers.PEERS,
    "manyhands-plain": lambda problem: manyhands(problem, step=Step(optimize="off")),
    "manyhands-one-lane": lambda problem: manyhands(problem, without="side lanes"),
    "manyhands-pytorch-kernels": lambda problem: manyhands(problem, without="fused norms"),
    "manyhands": lambda problem: manyhands(problem),
    "manyhands-compiled-one-lane": lambda problem: manyhands(problem, without="side lanes", step=Step(optimize="max")),
    "manyhands-compiled": lambda problem: manyhands(problem, step=Step(optimize="max")),
}


# --- the comparison


def measure(row: str, problem: Problem) -> dict[str, Any]:
    """One row, from the net's first weights to its test accuracy."""
    torch.manual_seed(problem.seed)
    peers.synchronize(problem.device)
    on_gpu = problem.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(problem.device)
    start = time.perf_counter()
    outcome = ROWS[row](problem)
    peers.synchronize(problem.device)
    total = time.perf_counter() - start
    first, *timed = outcome.seconds
    median = statistics.median(timed)
    return {
        "row": row,
        "seconds": median,
        "fastest": min(timed),
        "slowest": max(timed),
        "images_per_second": len(problem.images) / median,
        "first_epoch_extra": first - median,
        "total": total,
        "peak": torch.cuda.max_memory_allocated(problem.device) if on_gpu else 0,
        "train_loss": outcome.losses[-1],
        "val_acc": peers.test_accuracy(outcome.net, problem),
        "epochs": outcome.seconds,
        "notes": outcome.notes,
    }


def measure_apart(
    row: str, problem: Problem, cache: str | None = None, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Measure a row in a process of its own; without ``cache`` it begins with an empty one for compilers."""
    given = cloudpickle.dumps((row, problem))
    return apart.measure([__file__, "--measure-one"], cache=cache, given=given, **(variables or {}))


def measure_one() -> int:
    """The child's half of :func:`measure_apart`."""
    peers.hush()
    row, problem = cloudpickle.load(io.BytesIO(sys.stdin.buffer.read()))
    with apart.turn():
        print(json.dumps(measure(row, problem)))
    return 0


def compare(rows: list[str], problem: Problem) -> tuple[list[dict[str, Any]], list[str]]:
    """All rows, one after the other; those that were left out, broke or look broken, in words."""
    measured, left_out = [], []
    for row in rows:
        if reason := peers.why_not(row, problem):
            left_out.append(f"{row}: skipped, {reason}")
            continue
        found = measure_apart(row, problem)
        if "failed" in found:
            left_out.append(f"{row}: FAILED, {found['failed']}")
            continue
        measured.append(found)
        print(f"  {row}: {found['seconds']:.3f} s {'; '.join(found['notes'])}", flush=True)
    return measured, left_out + weak_rivals(measured)


def weak_rivals(measured: list[dict[str, Any]]) -> list[str]:
    """The rows that are not faster than their own weaker form, in words: they may be broken."""
    seconds = {row["row"]: row["seconds"] for row in measured}
    return [
        f"{row}: no faster than {weaker}, its own weaker form: look at it before you quote it"
        for row, weaker in peers.WEAKER.items()
        if row in seconds and weaker in seconds and seconds[row] > 0.98 * seconds[weaker]
    ]


def add_ratios(measured: list[dict[str, Any]]) -> None:
    """How many times as fast as the fastest framework, and as the eager loop by hand."""
    by_row = {row["row"]: row["seconds"] for row in measured}
    best = min((by_row[row] for row in FRAMEWORKS if row in by_row), default=None)
    for row in measured:
        row["times_best_peer"] = best / row["seconds"] if best else None
        row["times_eager"] = by_row["eager"] / row["seconds"] if "eager" in by_row else None


def print_table(measured: list[dict[str, Any]]) -> None:
    titles = (
        "s/epoch",
        "min",
        "max",
        "images/s",
        "x peer",
        "x eager",
        "loss",
        "test acc",
        "1st +s",
        "total s",
        "peak MB",
    )
    print(f"{'row':28}" + "".join(f"{title:>9}" for title in titles))
    for row in measured:
        ratios = [f"{row[key]:.2f}" if row[key] else "-" for key in ("times_best_peer", "times_eager")]
        cells = [f"{row[key]:.3f}" for key in ("seconds", "fastest", "slowest")]
        cells += [f"{row['images_per_second']:.0f}", *ratios, f"{row['train_loss']:.4f}", f"{row['val_acc']:.4f}"]
        cells += [f"{row['first_epoch_extra']:.1f}", f"{row['total']:.1f}"]
        cells += [f"{row['peak'] / 1e6:.0f}" if row["peak"] else "-"]
        print(f"{row['row']:28}" + "".join(f"{cell:>9}" for cell in cells))
    print("x peer: speed against the best of book, Lightning and Accelerate; x eager: against the loop tuned by hand.")
    print("1st +s: the first epoch over the median (warm-up; compiling, where it is done); total s: the whole call.")
    print("peak MB: the GPU's memory, data on it included; ddp: the loop by hand with its buckets of gradients.")


# --- the other modes


def accuracy(problem: Problem) -> dict[str, Any]:
    """Train as one would for a good result, and look at it."""
    net = problem.net()

    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4)

    start = time.perf_counter()
    result = trainer_for(problem, optimizer=optimizer, schedule=one_cycle).fit(net, arrays(problem))
    total = time.perf_counter() - start
    reached = peers.test_accuracy(net, problem)
    loss = result.rows[-1]["train_loss"]
    print(f"{'; '.join(result.notes)}")
    print(f"test acc {reached:.4f}, train loss {loss:.4f} after {problem.epochs} epochs in {total:.1f} s", end="")
    print(f" ({result.seconds_per_epoch:.3f} s/epoch)")
    return {"val_acc": reached, "train_loss": loss, "total": total, "rows": result.rows, "notes": result.notes}


def by_turns(ways: dict[str, Callable[[], Outcome]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the last epoch of each way, taken in turns, so that a busy moment of the machine meets all."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(way().seconds[-1])
            print(f"    {name}: {seconds[name][-1]:.3f} s", flush=True)
    return seconds


def print_ratio(what: str, above: list[float], below: list[float], wanted: str) -> float:
    ratio = statistics.median(above) / statistics.median(below)
    pairs = sorted(first / second for first, second in zip(above, below, strict=True))
    print(f"{what}: {ratio:.3f} (by pairs {pairs[0]:.3f} to {pairs[-1]:.3f}; wanted {wanted})")
    return ratio


def scaling_problem(problem: Problem, model: str, batch: int, steps: int) -> Problem:
    part = slice(min(batch * steps, len(problem.images)))
    images, labels = problem.images[part], problem.labels[part]
    cpu = torch.device("cpu")
    return replace(problem, model=model, batch_size=batch, epochs=2, device=cpu, images=images, labels=labels)


def by_hand(problem: Problem) -> Outcome:
    """With the precision and the memory format that the trainer chooses."""
    quick = problem.bf16_is_quick
    return peers.eager(problem, bf16=quick, channels_last=quick, fused=False)


def cpu_scaling(problem: Problem, rounds: int) -> dict[str, Any]:
    """One device against a loop by hand; two ranks of one thread against one rank of two."""
    torch.set_num_threads(machine.usable_cores())
    print(f"{torch.get_num_threads()} threads; medians of {rounds} rounds, taken in turns, each after a first epoch")
    figures: dict[str, Any] = {}
    for model, batch, steps in SCALING:
        small = scaling_problem(problem, model, batch, steps)
        ways = {"by hand": partial(by_hand, small), "1 rank": partial(manyhands, small)}
        if model == "resnet18":
            ways["2 ranks"] = partial(manyhands, small, workers=Workers(per_device=2))
        seconds = by_turns(ways, rounds)
        shown = ", ".join(f"{name} {statistics.median(times):.3f} s" for name, times in seconds.items())
        print(
            f"{model}, batch {batch}, {steps} steps, {'bf16' if small.bf16_is_quick else 'fp32'}: {shown}", flush=True
        )
        hand, rank = seconds["by hand"], seconds["1 rank"]
        figures[model] = {
            "seconds": seconds,
            "over_hand": print_ratio("  time, 1 rank / by hand", rank, hand, "<= 1.03"),
        }
        if two := seconds.get("2 ranks"):
            figures[model]["two_ranks"] = print_ratio("  speed, 2 ranks x 1 / 1 rank x 2 threads", rank, two, ">= 0.9")
    return figures


# --- the command


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, with commas between: %(default)s")
    parser.add_argument("--epochs", type=int, help="timed epochs: 3 (--accuracy: all epochs, 10)")
    parser.add_argument("--samples", type=int, help="only the first so many training images")
    parser.add_argument("--model", default="resnet18", choices=sorted(peers.models.MODELS))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5, help="of --cpu-scaling: %(default)s")
    parser.add_argument("--data", help="a directory with the four files of Fashion-MNIST")
    parser.add_argument("--json", help="a file for all figures")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--accuracy", action="store_true", help="ten epochs with a one-cycle schedule")
    modes.add_argument("--cpu-scaling", action="store_true", help="one and two ranks on the CPU")
    flags = parser.parse_args()
    flags.rows = [row.strip() for row in flags.rows.split(",")]
    if unknown := [row for row in flags.rows if row not in ROWS]:
        parser.error(f"no such row: {', '.join(unknown)}. There are {', '.join(ROWS)}")
    flags.epochs = flags.epochs if flags.epochs is not None else (10 if flags.accuracy else 3)
    if flags.epochs < 1:
        parser.error("--epochs: at least 1")
    return flags


def problem_of(flags: argparse.Namespace) -> tuple[Problem, str]:
    data = fashion_mnist.load(flags.data)
    tensors = [torch.from_numpy(part) for part in (data.train.images, data.train.labels)]
    tests = [torch.from_numpy(part) for part in (data.test.images, data.test.labels)]
    problem = Problem(
        flags.model,
        *(tensor[: flags.samples] for tensor in tensors),
        *tests,
        device=torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"),
        batch_size=flags.batch_size,
        lr=flags.lr,
        epochs=flags.epochs if flags.accuracy else flags.epochs + 1,
    )
    return problem, "the small subset" if data.subset else "Fashion-MNIST"


def header(flags: argparse.Namespace, problem: Problem, data: str) -> str:
    on_gpu = problem.device.type == "cuda"
    host = f"{machine.usable_cores()} cores {machine.host_name()}"
    hardware = f"{torch.cuda.get_device_name(problem.device)}, {host}" if on_gpu else host
    software = ", ".join([f"Python {platform.python_version()}", *peers.versions()])
    what = f"{flags.model}, {len(problem.images)} images of {data}, batch {flags.batch_size}, lr {flags.lr}"
    return f"{hardware}; {software}; {datetime.date.today()}; {what}; n = {flags.epochs} epochs after a first"


def main() -> int:
    flags = options()
    peers.hush()
    problem, data = problem_of(flags)
    words = header(flags, problem, data)
    left_out: list[str] = []
    if flags.accuracy or flags.cpu_scaling:
        print(words.split("; n = ")[0] if flags.accuracy else words.split(f"; {flags.model}")[0])
        measured: Any = accuracy(problem) if flags.accuracy else cpu_scaling(problem, flags.rounds)
    else:
        measured, left_out = compare(flags.rows, problem)
        add_ratios(measured)
        print("\n" + words)
        for line in left_out:
            print(line)
        print_table(measured)
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump({"header": words, "measured": measured, "left_out": left_out}, file, indent=1)
    return 1 if any("FAILED" in line for line in left_out) else 0


if __name__ == "__main__":
    sys.exit(measure_one() if sys.argv[1:] == ["--measure-one"] else main())
