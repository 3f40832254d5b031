"""Which way each problem is solved: tried once, compared and timed, then remembered, here and on disk.

Trying costs time that a job has to win back. Problems that are farthest from what a GPU could do come first. Ways are
run behind a pause of the device, so that the time of the device is measured and not that of launching. Half of what was
won so far, times the steps that the job will make, may be spent, and a small stake. The next job goes on from there.
"""

from __future__ import annotations

import atexit
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from manyhands.backends.torch import compat
from manyhands.backends.torch.convolutions import cudnn_plans, products
from manyhands.backends.torch.convolutions.problems import Form, Kind, Problem, layout
from manyhands.backends.torch.kernels.nvrtc import driver_version
from manyhands.cache import CacheFile

_FORMAT = 1
_STAKE = 0.3  # seconds that may be spent without having won anything yet
_MOST_PLANS = 48  # of cuDNN's, for one problem
_PATIENCE = 16  # ways one after the other that are not faster: then the rest is not tried
# Multiplications and additions, and bytes, a second: those of a GPU of a data centre. Only their ratio matters much.
_RATES = (700e12, 3.5e12)
_FASTER = 0.97  # of PyTorch's time: less is not worth another way
_PAUSE = 400_000  # cycles of the device for each launch that is timed: longer than launching takes
_FIRST, _MORE, _ROUNDS = 3, 6, 3  # launches in a first timing, in each of the rounds of the second
_FINALISTS = 3
_aten = torch.ops.aten


class Way(Protocol):
    """Solves one problem."""

    name: str

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor: ...

    def data(self) -> list[object]: ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """The way of a problem, None: PyTorch's; the form of its result; the seconds that it and PyTorch's take."""

    way: Way | None
    result: Form
    seconds: float
    theirs: float


@dataclass(slots=True)
class Report:
    """What became of the convolutions of a step."""

    faster: dict[str, int]  # how many are solved by each kind of way
    all: int = 0
    gained: float = 0.0  # seconds of a step, estimated
    spent: float = 0.0  # seconds
    left: int = 0  # problems that were not tried

    def explain(self) -> str:
        """In one line.

        >>> Report({"cudnn": 3}, all=9, gained=1e-4, spent=0.2).explain()
        'convolutions: 3 of 9 faster by other plans of cuDNN, about 100 us a step; chosen in 0.2 s'
        """
        names = {"cudnn": "other plans of cuDNN", "product": "matrix products"}
        ways = " and ".join(names.get(name, name) for name, count in self.faster.items() if count)
        count = sum(self.faster.values())
        gained = f" faster by {ways}, about {self.gained * 1e6:.0f} us a step" if count else " faster in another way"
        left = f", {self.left} left for the next job" if self.left else ""
        why = cudnn_plans.missing()
        note = f" (PyTorch's and products only: {why})" if why is not None and not self.faster.get("cudnn") else ""
        return f"convolutions: {count} of {self.all}{gained}; chosen in {self.spent:.1f} s{left}{note}"


_table: dict[Problem, Chosen] = {}
_lock = threading.Lock()


def way_of(problem: Problem | None) -> Way | None:
    """The way that was chosen for a problem; None: PyTorch's."""
    chosen = chosen_for(problem)
    return None if chosen is None else chosen.way


def chosen_for(problem: Problem | None) -> Chosen | None:
    """What is known of a problem."""
    return _table.get(problem) if problem is not None else None


@atexit.register
def forget() -> None:
    """Solve every problem in PyTorch's way again, in this process."""
    _table.clear()
    cudnn_plans.close()


def choose(problems: Mapping[Problem, int], steps: int) -> Report:
    """Find the fastest ways of problems; each is given with how often it comes in a step of which so many are made."""
    begin = time.perf_counter()
    report = Report({}, all=sum(problems.values()))
    with _lock, torch.random.fork_rng(sorted({p.device.index or 0 for p in problems if p.device.type == "cuda"})):
        new = [problem for problem in problems if problem not in _table]
        file = _file(new[0].device) if new else None
        known = file.read() if file is not None else {}
        costs = {problem: seconds for problem in new if (seconds := _unknown(problem, known)) is not None}
        found: dict[str, object] = {}
        gained = 0.0
        for problem in sorted(costs, key=lambda problem: -_hope(problem, costs[problem]) * problems[problem]):
            if time.perf_counter() - begin > _STAKE + steps * gained / 2:
                report.left += 1
                continue
            chosen = _table[problem] = _Trial(problem).chosen()
            found[problem.key] = _as_data(chosen)
            gained += (chosen.theirs - chosen.seconds) * problems[problem]
        if file is not None and found:
            file.add(found)
    for problem, count in problems.items():
        chosen_before = _table.get(problem)
        if chosen_before is not None and chosen_before.way is not None:
            name = chosen_before.way.name
            report.faster[name] = report.faster.get(name, 0) + count
            report.gained += (chosen_before.theirs - chosen_before.seconds) * count
    report.spent = time.perf_counter() - begin
    return report


def _hope(problem: Problem, seconds: float) -> float:
    """How much may be won: the more, the farther it is from the roofline."""
    computing, moving = (amount / rate for amount, rate in zip(problem.work, _RATES, strict=True))
    far = max(0.0, seconds - max(computing, moving))
    return far * far / seconds if seconds else 0.0


def _unknown(problem: Problem, known: Mapping[str, object]) -> float | None:
    """The seconds that PyTorch takes for a problem that is to be tried; None where its way is known, or cannot be."""
    try:
        trial = _Trial(problem)
        entry = known.get(problem.key)
        return None if entry is not None and trial.remember(entry) else trial.seconds()
    except Exception:  # no memory, for example: PyTorch's way it is
        return None


class _Trial:
    """Tensors of a problem's forms, and PyTorch's result for them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._given = given = _random(problem, problem.first), _random(problem, problem.second)
        # What the result is a gradient of: PyTorch asks for it, and takes nothing but its form.
        form = problem.shape or (0,)
        other = torch.empty(form, dtype=problem.dtype, device=problem.device)
        self._other = other.contiguous(memory_format=layout(*given)) if len(form) == 4 else other  # type: ignore[arg-type]
        self._expected = self._theirs()
        self.result = Form.of(self._expected)

    def seconds(self) -> float:
        """Of PyTorch's way."""
        return _seconds(self._theirs, self.problem.device, _FIRST)

    def remember(self, known: Any) -> bool:
        """Take the way that a file names, if it can be made and gives the right result."""
        try:
            data, seconds, theirs = known
            way = None if data is None else self._made(data)
            if way is None or self._is_right(way):
                _table[self.problem] = Chosen(way, self.result, float(seconds), float(theirs))
                return True
        except Exception:  # of another version, or made by hand
            pass
        return False

    def _made(self, data: Any) -> Way:
        if data[0] == products.Product.name:
            return products.candidates(self.problem, self.result)[0]
        return cudnn_plans.remembered(self.problem, self.result, data)

    def chosen(self) -> Chosen:
        """The fastest way that gives the right result."""
        timed: list[tuple[float, int, Way]] = []
        for way in self._candidates():
            try:
                timed.append((_seconds(self._run(way), self.problem.device, _FIRST), len(timed), way))
            except Exception:  # one that cannot be run is no candidate
                continue
            if len(timed) - min(timed)[1] > _PATIENCE:
                break
        right = (way for *_, way in sorted(timed) if self._is_right(way))
        finalists: list[Way | None] = list(itertools.islice(right, _FINALISTS))
        best = self._race([None, *finalists])
        theirs = best[0]
        place = min(range(len(best)), key=best.__getitem__)
        if best[place] > _FASTER * theirs:
            return Chosen(None, self.result, theirs, theirs)
        return Chosen([None, *finalists][place], self.result, best[place], theirs)

    def _race(self, ways: list[Way | None]) -> list[float]:
        """The seconds of each, in turns."""
        rounds = [[_seconds(self._run(way), self.problem.device, _MORE) for way in ways] for _ in range(_ROUNDS)]
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def _candidates(self) -> Iterator[Way]:
        yield from products.candidates(self.problem, self.result)
        if self.problem.device.type == "cuda":
            yield from cudnn_plans.candidates(self.problem, self.result, _MOST_PLANS)

    def _run(self, way: Way | None) -> Callable[[], object]:
        return self._theirs if way is None else lambda: way(*self._given)

    def _is_right(self, way: Way) -> bool:
        """Whether its result is PyTorch's up to rounding, in the same form, and the same each time."""
        try:
            first, second = way(*self._given), way(*self._given)
        except Exception:  # no memory, for example
            return False
        if Form.of(first) != self.result or not torch.equal(first, second):
            return False
        exact = self._expected.double()
        error = (first.double() - exact).norm() / exact.norm().clamp_min(1e-30)
        return bool(error <= torch.finfo(self.problem.dtype).eps)

    def _theirs(self) -> torch.Tensor:
        """PyTorch's way."""
        problem, (first, second) = self.problem, self._given
        result: torch.Tensor
        how: Any = (problem.stride, problem.padding, problem.dilation, False, (0, 0), problem.groups)
        if problem.kind is Kind.FORWARD:
            result = _aten.convolution.default(first, second, None, *how)
            return result
        other = self._other
        if problem.kind is Kind.INPUT_GRADIENT:
            result = _aten.convolution_backward.default(first, other, second, None, *how, [True, False, False])[0]
        else:
            result = _aten.convolution_backward.default(first, second, other, None, *how, [False, True, False])[1]
        return result


def _random(problem: Problem, form: Form) -> torch.Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=problem.dtype, device=problem.device).normal_()


def _seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """How long the device works for one call."""
    if device.type != "cuda":
        run()
        begin = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begin) / times
    with torch.cuda.device(device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        compat.pause(_PAUSE * times)
        before.record()
        for _ in range(times):
            run()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3 / times


def _as_data(chosen: Chosen) -> list[object]:
    return [None if chosen.way is None else chosen.way.data(), chosen.seconds, chosen.theirs]


def _file(device: torch.device) -> CacheFile:
    """Where ways are remembered: they depend on the device, the driver and the libraries."""
    words = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        words += [
            torch.cuda.get_device_name(device),
            f"CUDA {torch.version.cuda}, driver {driver_version()}",
        ]
        words.append(cudnn_plans.missing() or cudnn_plans.version())
    return CacheFile("convolutions", "; ".join(words), _FORMAT)
