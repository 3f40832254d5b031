"""Plans one graph: its candidates are made, tried, and the fastest right one becomes the :class:`Plan`.

The graph is functional: it has no effects but its results, and copies to its arguments at the end. So it is traced
already, and trying a plan never runs the user's code. Running the graph operation by operation is always a candidate.

``compile`` adds Inductor's code of the whole graph. On a GPU the other candidates may then be left for later, so that
the first call takes little longer than compiling: they are tried once lanes could have saved, in all calls so far, as
much time as trying them takes.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from manyhands.amounts import count_of
from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes import compile_whole
from manyhands.backends.torch.planning import Tensor
from manyhands.backends.torch.run.costs import cost_keys
from manyhands.errors import CannotFuse, first_line
from manyhands.parallel import candidates, explain
from manyhands.parallel.plan import Plan
from manyhands.parallel.trials import Candidate, Trials, Tried

_SIDE_BY_SIDE = 1.1  # ratio of a graph's work to its longest chain from which lanes are worth trying
_LIBRARY_GAIN = 0.1  # of compiled code's time: what a graph of uncompiled operations may save
_TRYING = 5.0  # seconds: measuring operations, capturing and comparing a graph of them
_PATIENCE = 1.0  # seconds before anything is printed


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``parallel(fn)`` that change how a graph is planned."""

    reuse_outputs: bool = False
    memory: float = 1.3
    compile: bool = False
    synchronous: bool = False
    later: bool = False  # with ``compile`` on a GPU: other candidates are left for later


def plan(
    trace: Trace,
    tensors: Sequence[Tensor],
    options: PlanOptions,
    progress: PlanningProgress,
    instead_of: Plan | None = None,
) -> Plan:
    """The plan of a traced graph for tensors like these.

    ``instead_of``: the plan so far; what it has left is tried, and the better one returned.
    """
    devices = planning.device_of(trace)
    later = options.later and options.compile and devices is not None and instead_of is None
    trials = Trials(trace, tensors, devices, options.memory, options.reuse_outputs, measure=not later)
    try:
        with planning.restore_after(trace, tensors):
            return _try_candidates(trials, options, progress, instead_of, later=later)
    except Exception as error:  # whatever fails while plans are tried: the graph itself remains
        note = f"it could not be planned: {first_line(error)}"
        if instead_of is not None:
            return replace(instead_of, notes=(*instead_of.notes, note), left_after=None)
        return Plan(planning.as_written(trace), notes=(note,))


def _try_candidates(
    trials: Trials, options: PlanOptions, progress: PlanningProgress, instead_of: Plan | None, *, later: bool
) -> Plan:
    progress.enters("costs")
    if options.synchronous:
        return _build(trials, trials.without_trial(candidates.synchronous(trials)), progress)
    best = trials.without_trial(candidates.plain(trials))
    if instead_of is not None:
        assert instead_of.schedule is not None
        assert instead_of.peaks is not None
        trials.seconds |= instead_of.seconds
        so_far = Candidate(instead_of.method, instead_of.schedule, trials.trace)
        best = Tried(so_far, instead_of.run, instead_of.exactness, instead_of.peaks)
    elif options.compile:
        start = time.perf_counter()
        best = trials.choose(_compile(trials, progress), best)
        if later and best.method.compiled:
            return _build(trials, best, progress, _left_after(trials, time.perf_counter() - start, best))
        trials = replace(trials, measure=True) if later else trials  # costs were only estimated so far
    progress.enters("trials")
    fastest = trials.choose(candidates.candidates(trials), best)
    if instead_of is not None and fastest is best:  # its schedule may be that of compiled code
        return replace(instead_of, seconds=trials.seconds, notes=tuple(trials.notes), left_after=None)
    return _build(trials, fastest, progress)


def _compile(trials: Trials, progress: PlanningProgress) -> list[Candidate]:
    """The graph compiled as a whole, if that is possible."""
    progress.enters("compiling")
    try:
        return [candidates.compile_whole(trials, compile_whole(trials.trace))]
    except CannotFuse as error:
        trials.notes.append(str(error))
        return []
    finally:
        progress.enters("trials")


def _left_after(trials: Trials, trying: float, best: Tried) -> int:
    """The number of calls in which the other candidates could save as many seconds as trying them takes.

    At best, lanes reduce the time to the longest chain's share of the work. Without lanes only kernels of libraries can
    win against compiled code, by a little.
    """
    measured = trials.measured
    overlapping = measured.work() > _SIDE_BY_SIDE * measured.critical_path()
    share = 1 - measured.critical_path() / measured.work() if overlapping else _LIBRARY_GAIN
    seconds, gain = max(trying, _TRYING) if overlapping else _TRYING, trials.seconds[best.method] * share
    left = math.ceil(seconds / gain)
    trials.notes.append(
        f"uncompiled operations {'on lanes' if overlapping else 'in one graph'} are tried after "
        f"{count_of(left, 'call')}: that takes about {seconds:.1f} s, and would save at most {gain * 1e6:.0f} us a call"
    )
    return left


def _build(trials: Trials, best: Tried, progress: PlanningProgress, left_after: int | None = None) -> Plan:
    candidate, trace = best.candidate, best.candidate.trace
    hint = functools.partial(planning.batch_hint, trials.trace)
    progress.enters("")
    return Plan(
        best.run,
        best.method,
        best.exactness,
        candidate.schedule,
        trials.footprint_of(trace),
        best.peaks,
        seconds=dict(trials.seconds),
        predicted=dict(trials.predicted),
        notes=tuple(trials.notes),
        advice=explain.advice(trials.measured, cost_keys(trials.trace), hint),
        costs=trials.costed.summary(),
        planning=progress.summary(),
        left_after=left_after,
        timed=functools.partial(planning.task_moments, trace, candidate.schedule, trials.devices, candidate.threads),
    )


# Progress


class PlanningProgress:
    """``with PlanningProgress("step") as progress: progress.enters("capture"); ...``; then ``progress.spent``."""

    def __init__(self, name: str, *, shown: bool = True) -> None:
        self.spent: dict[str, float] = {}  # the seconds of each part
        self._name, self._part, self._since = name, "", time.perf_counter()
        self._timer = threading.Timer(_PATIENCE, self._say) if shown else None
        self._said = False

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.enters("")
        if self._timer is not None:
            self._timer.cancel()
        if self._said and error is None:
            _print(f"planned {self._name} in {self.summary()}")

    def enters(self, part: str) -> None:
        """Start a part of planning; ends the previous part."""
        now = time.perf_counter()
        if self._part:
            self.spent[self._part] = self.spent.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now

    def summary(self) -> str:
        """The time that planning took, with its parts: ``2.1 s (capture 1.2, trials 0.9)``."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.spent.items() if seconds >= 0.05)
        return f"{sum(self.spent.values()):.1f} s" + (f" ({parts})" if parts else "")

    def _say(self) -> None:
        self._said = True
        _print(f"planning {self._name}: {self._part} ...")


def _print(text: str) -> None:
    if sys.stderr is not None:  # a program without a console
        print(f"manyhands: {text}", file=sys.stderr, flush=True)
