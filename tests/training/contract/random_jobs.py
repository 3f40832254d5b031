"""Random small trainings, and what has to be the same about them in every framework.

A :class:`Case` is drawn from a seed: a model, a loss, an optimizer, a kind of data, and options. Each framework has its
own words for these, in ``words_<framework>.py``. Three things are compared, in float64:

* training on one device, the plain way, with training on three, with shares and micro-batches;
* that training with itself, stopped at some step and resumed: to the bit on as many devices, closely on another number;
* the metrics of all of them, epoch by epoch.

What is not the same by design is not compared: dropout draws other numbers on another number of devices, and batch
normalisation over each device's own samples has other statistics.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support import StopAt, Stopped
from training_bench import Bench

from manyhands.cli.parity import largest_difference
from manyhands.errors import WorkerFailed
from manyhands.training.checkpoints import store
from manyhands.training.options import Checkpoints, Step
from manyhands.training.schedules import one_cycle

CLASSES, FEATURES, LENGTH, WORDS, PADDING = 3, 6, 4, 7, -1
OWN_SCHEDULE = "a schedule of its own"  # an optimizer with it takes none of the trainer's
DEVICES = 3
CLOSE = 1e-9
MOST_STEPS = 12


@dataclass(frozen=True)
class ModelKind:
    """A way to make a model in float64, the same at every call, and what it takes and gives.

    ``mixes``: it takes statistics over a batch. ``draws``: it draws random numbers. ``step``: it has a
    ``training_step`` for targets of that kind.
    """

    make: Callable[[], Any]
    inputs: str = "vectors"
    gives: str = "scores"
    mixes: bool = False
    draws: bool = False
    step: str | None = None


@dataclass(frozen=True)
class LossKind:
    """What is given to a trainer as ``loss``; for which answers, and for which targets."""

    loss: Any
    targets: str = "classes"
    takes: str = "scores"


@dataclass(frozen=True)
class Case:
    """One training, in full."""

    seed: int
    model: str
    loss: str
    optimizer: str
    rate: float
    data: str
    samples: int
    tested: int
    batch_size: int
    epochs: int
    # Of the training on three devices alone.
    shares: list[float] | None
    accumulate: int
    # Of all of them.
    options: dict[str, Any] = field(default_factory=dict)
    schedule: str = "none"
    stop: str = "by an exception"
    stop_after: int = 1
    resumed_on: int = DEVICES

    @property
    def steps(self) -> int:
        return self.epochs * -(-self.samples // self.batch_size)


SCHEDULES: dict[str, Callable[[float], float]] = {
    "one cycle": one_cycle,
    "half way down": lambda done: 1.0 if done < 0.5 else 0.1,
}


def draw(seed: int, words: Any) -> Case:
    """The case of a seed: the same on every machine."""
    random = np.random.default_rng(seed)

    def some(names: Any) -> Any:
        names = list(names)
        return names[int(random.integers(len(names)))]

    model = some(words.models)
    kind = words.models[model]
    fitting = [name for name, loss in words.losses.items() if loss.takes == kind.gives] if kind.step is None else []
    batch_size = int(random.integers(DEVICES, 14))
    epochs = int(random.integers(1, 4))
    # The last batch is short, of a single sample or whole; at most so many steps that no chaos sets in.
    samples = int(random.integers(batch_size, batch_size * (MOST_STEPS // epochs) + 1))
    if kind.mixes and samples % batch_size == 1:
        samples += 1  # a single sample has no statistics, and PyTorch refuses it
    options: dict[str, Any] = {"seed": int(random.integers(1000))}
    options["checkpoints"] = Checkpoints(every=int(random.integers(1, 4)), keep=100)
    step: dict[str, Any] = {}
    if random.random() < 0.3:
        options["gradient_clip_val"] = float(some([0.01, 0.3, 100.0]))
    if random.random() < 0.15 and "on_nan" not in words.without:
        step["on_nan"] = "continue"
    if random.random() < 0.5:
        options["precision"] = "fp64"
    if kind.mixes and random.random() < 0.8 and not {"batch_stats", "batch_stats='global'"} & words.without:
        step["batch_stats"] = "global"
    options["step"] = Step(**step)
    shares = accumulate = None
    if random.random() < 0.5 and "shares" not in words.without:
        shares = [float(round(one, 2)) for one in random.dirichlet([1.0] * DEVICES)]
        shares = some([shares, [0.5, 0.0, 0.5], [0.0, 0.3, 0.7], shares])
    if random.random() < 0.4 and "accumulate" not in words.without and not kind.mixes:
        accumulate = int(random.integers(2, 5))
    case = Case(
        seed=seed,
        model=model,
        loss=some(fitting) if fitting else "its own",
        optimizer=some(words.optimizers),
        rate=float(some([0.003, 0.02, 0.1])),
        data=some(words.data),
        samples=samples,
        tested=int(some([0, 1, 11, 30])),
        batch_size=batch_size,
        epochs=epochs,
        shares=shares,
        accumulate=accumulate or 1,
        options=options,
        schedule=some(["none", "none", *SCHEDULES]),
        stop=some(["by an exception", "at a checkpoint"]),
        resumed_on=int(some([DEVICES, DEVICES, DEVICES, 1])),
    )
    if case.optimizer == OWN_SCHEDULE:
        case = replace(case, schedule="none", stop="at a checkpoint")
    return _stopped(case, random)


def _stopped(case: Case, random: np.random.Generator) -> Case:
    """Somewhere between the first checkpoint and the end."""
    first = min(case.options["checkpoints"].every, -(-case.samples // case.batch_size))
    if first >= case.steps:
        return replace(case, stop="at a checkpoint", stop_after=first)
    return replace(case, stop_after=int(random.integers(first, case.steps)))


# The arrays


def arrays(case: Case, words: Any, count: int, part: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Random samples with targets that have something to do with them."""
    random = np.random.default_rng([case.seed, part])
    kind = words.models[case.model]
    targets = kind.step or words.losses[case.loss].targets
    if kind.inputs == "words":
        X: NDArray[Any] = random.integers(WORDS, size=(count, LENGTH)).astype(np.int32)
        told = X % CLASSES
    else:
        X = random.normal(size=(count, FEATURES) if kind.inputs == "vectors" else (count, FEATURES, FEATURES))
        told = (np.abs(X).reshape(count, -1)[:, :LENGTH] * 3).astype(int) % CLASSES
    if kind.inputs == "images":
        X = X[:, None] if words.channels_first else X[..., None]
    if targets == "numbers":
        return X, random.normal(size=(count, CLASSES)) + told[:, :1]
    if targets == "classes":
        return X, told[:, 0].astype(np.int64)
    # Texts of unlike lengths, the first few of them equally long.
    there = random.integers(1, LENGTH + 1, size=(count, 1))
    there[:4] = LENGTH
    return X, np.where(np.arange(LENGTH) < there, told, PADDING).astype(np.int64)


class Batches:
    """A loader that is nothing but something to iterate over, of a known length."""

    def __init__(self, X: Any, y: Any, size: int) -> None:
        self.X, self.y, self.size = X, y, size

    def __len__(self) -> int:
        return -(-len(self.X) // self.size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.X), self.size):
            yield self.X[start : start + self.size], self.y[start : start + self.size]


# Trainings


class Schedule(StopAt):
    """A schedule by its name, so that it can go to other processes; raises in the step after so many."""

    def __init__(self, name: str, stop_after: int | None = None) -> None:
        super().__init__(stop_after)
        self.name = name

    def __call__(self, done: float) -> float:
        plain = super().__call__(done)
        return SCHEDULES[self.name](done) if self.name != "none" else plain


def fit(bench: Bench, case: Case, devices: int, run: Path, *, plain: bool = False, **options: Any) -> Any:
    """Train in a run folder. ``plain``: without shares and micro-batches."""
    words = bench.words
    make, has_batch_size = words.data[case.data]
    given: dict[str, Any] = dict(case.options)
    if not has_batch_size:
        given["batch_size"] = case.batch_size
    if case.loss != "its own":
        given["loss"] = words.losses[case.loss].loss
    if not plain:
        shares = case.shares if devices == DEVICES else None
        given["step"] = replace(given["step"], shares=shares, accumulate=case.accumulate)
    if case.schedule != "none" or case.stop == "by an exception":
        given["schedule"] = Schedule(case.schedule)
    with words.float64():
        parts = [make(*arrays(case, words, count, part), case.batch_size, train=not part)
                 for part, count in enumerate([case.samples, case.tested]) if count]  # fmt: skip
        model = words.models[case.model].make()
        given |= {"optimizer": words.optimizers[case.optimizer](case.rate), "run": run, **options}
        trainer = bench.mh.Trainer(case.epochs, quiet=True, **bench.on(devices), **given)
        return trainer.fit(model, tuple(parts) if case.tested else parts[0])


def stop(bench: Bench, case: Case, whole: Path) -> Path:
    """The folder of a run that did not come further than ``stop_after`` steps."""
    if case.stop == "at a checkpoint":
        run = whole.with_name(f"{whole.name}-stopped")
        shutil.copytree(whole, run)
        store.drop_after(run / "checkpoints", case.stop_after)
        return run
    run = bench.new_run()
    try:
        fit(bench, case, DEVICES, run, schedule=Schedule(case.schedule, case.stop_after))
    except (Stopped, WorkerFailed):
        return run
    raise AssertionError(f"the training was to stop after {case.stop_after} steps of {case.steps}, and did not")


def differences(bench: Bench, case: Case) -> Iterator[str]:
    """What is not as it should be."""
    words = bench.words
    kind = words.models[case.model]
    per_device = kind.mixes and case.options["step"].batch_stats != "global" and "batch_stats" not in words.without
    comparable = not kind.draws and not per_device
    run = bench.new_run()
    three = fit(bench, case, DEVICES, run)
    if comparable:
        alone = fit(bench, case, 1, bench.new_run(), plain=True)
        yield from _compared(bench, "on three devices", three, alone, CLOSE)
    resumed = fit(bench, case, case.resumed_on, stop(bench, case, run), resume="auto")
    if case.resumed_on == DEVICES:
        yield from _compared(bench, "stopped and resumed", resumed, three, 0.0)
    elif comparable:
        yield from _compared(bench, f"stopped and resumed on {case.resumed_on}", resumed, three, CLOSE)


def _compared(bench: Bench, what: str, result: Any, expected: Any, close: float) -> Iterator[str]:
    difference = largest_difference(bench.weights(result.run), bench.weights(expected.run))
    if not difference <= close:
        yield f"{what}: weights differ by {difference:.2e}"
    if len(result.rows) != len(expected.rows):
        yield f"{what}: {len(result.rows)} epochs, not {len(expected.rows)}"
    for row, other in zip(result.rows, expected.rows, strict=False):
        for name in ("epoch", "samples", "train_loss", "train_acc", "val_loss", "val_acc"):
            one, two = row.get(name), other.get(name)
            if (one is None) != (two is None) or (one is not None and abs(one - two) > CLOSE * max(1.0, abs(two))):
                yield f"{what}: {name} of epoch {other['epoch']} is {one}, not {two}"
