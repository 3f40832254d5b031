"""Chooses how each convolution is computed: candidates are compared and timed once, and the choice is stored on disk.

Trying candidates costs time that a job has to win back. The convolutions that are farthest from what the GPU could do
come first. Candidates are launched while the device pauses, so that the measured time is the device's and not that of
launching. A job may spend half of what its choices so far will save over all of its steps, plus a small fixed stake.
The next job continues from there.
"""

from __future__ import annotations

import atexit
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from manyhands.backends.cache import CacheFile
from manyhands.backends.torch import compat
from manyhands.backends.torch.convolutions import cudnn_plans, products
from manyhands.backends.torch.convolutions.problems import Form, Kind, Problem, layout
from manyhands.backends.torch.kernels.nvrtc import driver_version
from manyhands.schedule.timing import rounds

_FORMAT = 2
_STAKE = 0.5  # seconds that a job may spend on cuDNN's plans without having won anything yet
_MOST_PLANS = 48  # of cuDNN's, for one problem
_PATIENCE = 12  # consecutive ways that are not faster, after which the rest is not tried
# Multiplications and additions per second, and bytes per second, of a data centre GPU. Mainly their ratio matters.
_RATES = (700e12, 3.5e12)
_FASTER = 0.98  # of PyTorch's time: a smaller gain is not worth another way
_CLEARING = 1.5e-6  # seconds saved in a captured graph if the way's workspace is cleared ahead (on an H200)
_PAUSE = 400_000  # device cycles per timed launch: longer than launching takes
_FIRST, _MORE, _ROUNDS = 3, 6, 3  # launches in a first timing, in each of the rounds of the second
_FINALISTS = 3
_aten = torch.ops.aten


class Way(Protocol):
    """Solves one problem; in a forward problem, ``bias`` is added to the result.

    ``is_cleared_ahead``: a captured graph clears the way's workspace at its start, together with all others.
    """

    name: str
    is_cleared_ahead: bool

    def __call__(self, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor: ...

    def data(self) -> list[object]: ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen way of a problem (None: PyTorch's), the form of its result, the seconds of it and of PyTorch's way.

    ``is_complete``: everything was tried.
    """

    way: Way | None
    result: Form
    seconds: float
    default_seconds: float
    is_complete: bool = True


@dataclass(slots=True)
class Report:
    """The choices for the convolutions of a step."""

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
    """The chosen way of a problem; None: PyTorch's."""
    chosen = chosen_for(problem)
    return None if chosen is None else chosen.way


def chosen_for(problem: Problem | None) -> Chosen | None:
    """The stored choice for a problem, if there is one."""
    return _table.get(problem) if problem is not None else None


@atexit.register
def forget() -> None:
    """Solve every problem in PyTorch's way again, in this process."""
    _table.clear()
    cudnn_plans.close()


def choose(problems: Mapping[Problem, int], steps: int) -> Report:
    """Find the fastest ways of problems, given how often each occurs in a step and the number of steps.

    Products are always tried. cuDNN has many plans: they are tried as long as the job can win back the time.
    """
    begin = time.perf_counter()
    with _lock, torch.random.fork_rng(sorted({p.device.index or 0 for p in problems if p.device.type == "cuda"})):
        newly_tried = _begin(problems)
        gained = sum(_gain(problem) * problems[problem] for problem in newly_tried)
        todo = [problem for problem in problems if (known := _table.get(problem)) and not known.is_complete]
        todo.sort(key=lambda problem: -_possible_gain(problem) * problems[problem])
        end = time.perf_counter() + _STAKE + steps * gained / 2
        for problem in todo:
            if time.perf_counter() > end:
                break
            before = _table[problem]
            try:
                _table[problem] = _Trial(problem).by_plans(before)
            except Exception:  # out of memory, for example: keep the previous way
                _table[problem] = replace(before, is_complete=True)
            newly_tried.append(problem)
            end += steps * (_gain(problem) - (before.default_seconds - before.seconds)) * problems[problem] / 2
        if newly_tried:
            _file(newly_tried[0].device).add({problem.key: _as_data(_table[problem]) for problem in newly_tried})
    return _report(problems, time.perf_counter() - begin)


def _begin(problems: Mapping[Problem, int]) -> list[Problem]:
    """Load stored choices and try products; returns the problems without a stored choice."""
    new = [problem for problem in problems if problem not in _table]
    known = _file(new[0].device).read() if new else {}
    newly_tried: list[Problem] = []
    for problem in new:
        try:
            remembered = _remembered(problem, known.get(problem.key))
            _table[problem] = remembered or _Trial(problem).by_products()
        except Exception:  # out of memory, for example: use PyTorch's way
            continue
        if remembered is None:
            newly_tried.append(problem)
    return newly_tried


def _remembered(problem: Problem, entry: Any) -> Chosen | None:
    """The stored choice for a problem, if it still works; a cuDNN plan is compared with PyTorch's result again."""
    try:
        data, (shape, stride), seconds, default_seconds, complete = entry
        result = Form(tuple(shape), tuple(stride))
        way: Way | None = None
        if data is not None and data[0] == products.Product.name:
            way = products.candidates(problem, result)[0]
        elif data is not None:
            way = cudnn_plans.remembered(problem, result, data)
            if not _Trial(problem).is_correct(way):
                return None
        return Chosen(way, result, float(seconds), float(default_seconds), is_complete=bool(complete))
    except Exception:  # no entry, another version, or edited by hand
        return None


def _report(problems: Mapping[Problem, int], spent: float) -> Report:
    report = Report({}, all=sum(problems.values()), spent=spent)
    for problem, count in problems.items():
        chosen = _table.get(problem)
        if chosen is None:
            continue
        report.left += not chosen.is_complete
        if chosen.way is not None:
            report.faster[chosen.way.name] = report.faster.get(chosen.way.name, 0) + count
            report.gained += _gain(problem) * count
    return report


def _gain(problem: Problem) -> float:
    """Seconds that the chosen way saves compared with PyTorch's."""
    return _table[problem].default_seconds - _table[problem].seconds


def _possible_gain(problem: Problem) -> float:
    """How much may still be gained: the distance from the roofline."""
    seconds = _table[problem].seconds
    computing, moving = (amount / rate for amount, rate in zip(problem.work, _RATES, strict=True))
    far = max(0.0, seconds - max(computing, moving))
    return far * far / seconds if seconds else 0.0


class _Trial:
    """Tensors of a problem's forms, and PyTorch's result for them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._operands = operands = _random(problem, problem.first), _random(problem, problem.second)
        channels = problem.second.shape[0]
        self._bias = _random(problem, Form((channels,), (1,))) if problem.has_bias else None
        # The tensor that the result is a gradient of: PyTorch requires it, but uses only its form.
        form = problem.shape or (0,)
        other = torch.empty(form, dtype=problem.dtype, device=problem.device)
        self._other = other.contiguous(memory_format=layout(*operands)) if len(form) == 4 else other  # type: ignore[arg-type]
        self._expected = self._pytorch_result()
        self.result = Form.of(self._expected)

    def by_products(self) -> Chosen:
        """PyTorch's way, or a product."""
        on_gpu = self.problem.device.type == "cuda"
        return self._chosen(products.candidates(self.problem, self.result), None, is_complete=not on_gpu)

    def by_plans(self, before: Chosen) -> Chosen:
        """The fastest of PyTorch's way, the previous choice, and cuDNN's plans."""
        plans = cudnn_plans.candidates(self.problem, self.result, _MOST_PLANS)
        return self._chosen(plans, before.way, is_complete=True)

    def _chosen(self, candidates: Iterable[Way], before: Way | None, *, is_complete: bool) -> Chosen:
        """The fastest way that gives the right result."""
        timed: list[tuple[float, int, Way]] = []
        for way in candidates:
            try:
                timed.append((self._time(way, _FIRST), len(timed), way))
            except Exception:  # a way that cannot run is not a candidate
                continue
            if len(timed) - min(timed)[1] > _PATIENCE:
                break
        correct = (way for *_, way in sorted(timed) if self.is_correct(way))
        finalists: list[Way | None] = [None, *([before] if before is not None else [])]
        finalists += itertools.islice(correct, _FINALISTS)
        best = self._race(finalists)
        place = min(range(len(best)), key=best.__getitem__)
        place = place if best[place] <= _FASTER * best[0] else 0
        return Chosen(finalists[place], self.result, best[place], best[0], is_complete=is_complete)

    def _race(self, ways: list[Way | None]) -> list[float]:
        """The seconds of each way, timed in turns."""
        timed = itertools.islice(rounds(ways, lambda way: self._time(way, _MORE)), _ROUNDS)
        return [statistics.median(times) for times in zip(*timed, strict=True)]

    def _time(self, way: Way | None, times: int) -> float:
        """The seconds of a way; as far as known, those in a captured graph."""
        saved = _CLEARING if way is not None and way.is_cleared_ahead else 0.0
        return _seconds(self._run(way), self.problem.device, times) - saved

    def _run(self, way: Way | None) -> Callable[[], object]:
        return self._pytorch_result if way is None else lambda: way(*self._operands, self._bias)

    def is_correct(self, way: Way) -> bool:
        """Whether the way's result equals PyTorch's up to rounding, has the same form, and is the same each time."""
        try:
            first, second = (way(*self._operands, self._bias) for _ in range(2))
        except Exception:  # out of memory, for example
            return False
        if Form.of(first) != self.result or not torch.equal(first, second):
            return False
        exact = self._expected.double()
        error = (first.double() - exact).norm() / exact.norm().clamp_min(1e-30)
        return bool(error <= torch.finfo(self.problem.dtype).eps)

    def _pytorch_result(self) -> torch.Tensor:
        """The result of PyTorch's way."""
        problem, (first, second) = self.problem, self._operands
        result: torch.Tensor
        how: Any = (problem.stride, problem.padding, problem.dilation, False, (0, 0), problem.groups)
        if problem.kind is Kind.FORWARD:
            result = _aten.convolution.default(first, second, self._bias, *how)
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
    way = None if chosen.way is None else chosen.way.data()
    return [
        way,
        [chosen.result.shape, chosen.result.stride],
        chosen.seconds,
        chosen.default_seconds,
        chosen.is_complete,
    ]


def _file(device: torch.device) -> CacheFile:
    """The file of stored choices, which depend on the device, the driver and the libraries."""
    words = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        driver = f"CUDA {torch.version.cuda}, driver {driver_version()}"
        words += [torch.cuda.get_device_name(device), driver, cudnn_plans.version()]
    return CacheFile("convolutions", "; ".join(words), _FORMAT)
