"""``parallel(fn)``: trace, plan, check, measure, keep what is fastest; plain execution is always among the candidates.

A call is known by its signature (structure, shapes, strides, dtypes, devices, modes, plain values). The first call of a
signature traces the function, measures its operations, plans for several numbers of lanes, proves every plan, tries
the promising ones and compares results with plain execution. What is not faster, or not equal, is not used.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.engine import draw, parallel_cpu
from manyhands.engine.check import check
from manyhands.engine.costs import Costed, costs
from manyhands.engine.graph import graph
from manyhands.engine.schedule import Lane, Schedule, schedule
from manyhands.engine.simulate import bounds, simulate
from manyhands.engine.timeline import Timeline
from manyhands.errors import CannotTrace, EngineError, NotYet

_SIGNATURES = 8
_VARIANTS = 4  # plans of one signature, for different states of what the function takes from outside
_RECENT = 4  # plans that are asked whether they know a call before its signature is built
_PLANNINGS = 8  # of one signature; then it is run as it is
_LANES = (2, 3, 4, 8)
_CLOSE = 1e-5  # how far results may be from plain execution's (another kernel may add in another order)


# How a call is run: its tensors, and the arguments as they were given.
Run = Callable[[Sequence[Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Planned:
    """What is known of one signature."""

    run: Run
    how: str
    schedule: Schedule | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # Whether what the function takes from outside its arguments is as it was.
    holds: Callable[[], bool] = lambda: True
    again: bool = False  # plan anew at the next call
    costed: Costed | None = None
    # Recognises a call like the one that was planned, and gives its tensors.
    fits: Callable[[tuple[Any, ...], dict[str, Any]], list[Any] | None] | None = None


class Parallel:
    """A function that gives what the plain one gives, sooner where that is possible."""

    def __init__(
        self, function: Callable[..., Any], backend: Any, *, reuse_outputs: bool = False, synchronous: bool = False
    ) -> None:
        """``synchronous``: no lanes, no choice; the schedule's order in the caller's thread, for debugging."""
        functools.update_wrapper(self, function)
        self.function = function
        self.backend = backend
        self.reuse_outputs = reuse_outputs
        self.synchronous = synchronous
        self._planned: OrderedDict[Any, list[Planned]] = OrderedDict()
        self._plannings: dict[Any, int] = {}
        self._last: Planned | None = None
        self._recent: tuple[Planned, ...] = ()  # those that are asked first whether they know a call

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        for planned in self._recent:
            tensors = planned.fits(arguments, keywords)  # type: ignore[misc]
            if tensors is not None and planned.holds():
                self._last = planned
                return planned.run(tensors, arguments, keywords)
        call = self.backend.call(arguments, keywords)
        variants = self._planned.get(call.signature, ())
        planned = next((one for one in variants if one.holds()), None) or self._plan_anew(call)
        self._last = planned
        if not planned.again:
            self._remember(planned, call)
        return planned.run(*call.given)

    def _remember(self, planned: Planned, call: Any) -> None:
        if planned.fits is None:
            planned.fits = self.backend.recogniser(call)
        if planned.fits is not None:
            others = [one for one in self._recent if one is not planned]
            self._recent = (planned, *others[: _RECENT - 1])

    def _plan_anew(self, call: Any) -> Planned:
        count = self._plannings[call.signature] = self._plannings.get(call.signature, 0) + 1
        if count <= _PLANNINGS:
            planned = self._plan(call)
        else:
            why = "what it takes from outside is different at every call: pass it as an argument"
            planned = Planned(self._plainly, "plain execution", notes=[f"planned {_PLANNINGS} times already; {why}"])
        if not planned.again:
            variants = self._planned.setdefault(call.signature, [])
            variants.append(planned)
            del variants[:-_VARIANTS]
            if len(self._planned) > _SIGNATURES:
                gone, _ = self._planned.popitem(last=False)
                del self._plannings[gone]
        return planned

    # Telling

    def explain(self) -> str:
        """How the last call was run, what it took, what bounds it, and why it is not faster."""
        planned = self._must_have_run()
        lines = [f"{getattr(self.function, '__name__', 'function')}: run as {planned.how}"]
        for name, spent in planned.seconds.items():
            told = f", predicted {planned.predicted[name] * 1e3:.3f} ms" if name in planned.predicted else ""
            lines.append(f"  {name:<24} {spent * 1e3:9.3f} ms measured{told}")
        if planned.schedule is not None:
            lines += _about(planned.schedule)
        if planned.costed is not None:
            lines.append(f"  {planned.costed.told()}")
        return "\n".join([*lines, *(f"  {note}" for note in planned.notes)])

    def draw(self, path: str | Path) -> Path:
        """The graph as SVG, coloured by lane."""
        return draw.save(self._scheduled(), Path(path))

    def timeline(self, path: str | Path) -> Path:
        """When each task runs on which lane: a trace (``.json``) or a picture (``.png``), from measured costs."""
        return self.simulated().save(path)

    def simulated(self) -> Timeline:
        return simulate(self._scheduled())

    def _must_have_run(self) -> Planned:
        if self._last is None:
            raise EngineError("call the function first: it is planned for the arguments that it gets")
        return self._last

    def _scheduled(self) -> Schedule:
        planned = self._must_have_run()
        if planned.schedule is None:
            raise EngineError(f"there is no schedule: {planned.how}; {'; '.join(planned.notes)}")
        return planned.schedule

    # Planning

    def _plan(self, call: Any) -> Planned:
        try:
            found = self.backend.trace(self.function, call)
            device = self.backend.device_of(call, found)
        except CannotTrace as error:
            planned = Planned(self._plainly, "plain execution", notes=[f"cannot be traced: {error}"])
            planned.again = isinstance(error, NotYet)
            return planned
        with self.backend.untouched(found, call.tensors):
            planned = self._choose(call, found, device)
        planned.holds = found.holds
        return planned

    def _plainly(self, _: Sequence[Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return self.function(*arguments, **keywords)

    def _choose(self, call: Any, found: Any, device: Any) -> Planned:
        """Try plain execution, one lane, and the plans that promise more; keep the fastest that is right."""
        backend = self.backend
        costed = costs(backend, found, device)
        measured = graph(costed.tasks)
        best = Planned(self._plainly, "plain execution", costed=costed)
        if self.synchronous:
            parallel_cpu.synchronously(best, backend, found, measured)
            return best
        if device is None:
            parallel_cpu.choose(best, backend, call, found, measured)
            return best
        best.seconds["plain execution"] = least = backend.seconds(lambda: self._plainly(*call.given), device)
        expected = backend.expected(found, call, self._plainly)
        for name, made, make in _ways(backend, found, measured, best):
            plan = backend.one_lane(found) if made is None else _handed_over(backend, made)
            if made is not None:
                check(made)
                best.predicted[name] = simulate(made).seconds
            try:
                with backend.untouched(found, call.tensors):
                    run = make(found, plan, call.tensors, device)
                same, difference = backend.equal(backend.observed(found, call, run), expected)
                if not same and difference > _CLOSE:
                    best.notes.append(f"{name} is not used: its results differ by {difference:.1e}")
                    continue
                replaying = self._replaying(run, found)
                with backend.untouched(found, call.tensors):
                    spent = backend.seconds(lambda replaying=replaying: replaying(*call.given), device)
            except Exception as error:  # out of memory, an operation that cannot be captured: plain execution is there
                best.notes.append(f"{name} is not used: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
                continue
            best.seconds[name] = spent
            if spent < least:
                least = spent
                best.how = name + (", equal to the bit" if same else f", equal to {difference:.0e}")
                best.run = replaying
                best.schedule = made or schedule(measured, _lanes(measured, 1))
        return best

    def _replaying(self, run: Any, found: Any) -> Run:
        as_they_are = self.reuse_outputs or run.fresh

        def replay(tensors: Sequence[Any], *_: Any) -> Any:
            results = run.replay(tensors)
            return self.backend.together(results if as_they_are else self.backend.copied(results), found)

        return replay


def _ways(
    backend: Any, found: Any, measured: Any, best: Planned
) -> list[tuple[str, Schedule | None, Callable[..., Any]]]:
    """What is tried on a GPU: graphs where they can be captured, streams where the host takes part."""
    ways: list[tuple[str, Schedule | None, Callable[..., Any]]] = []
    candidates = _candidates(measured)
    if (reason := backend.why_no_graph(found)) is None:
        ways.append(("one lane, one graph", None, backend.graph_run))
        ways += [(f"{name}, one graph", made, backend.graph_run) for name, made in candidates]
    else:
        best.notes.append(reason)
    if backend.copies_or_computes_on_host(found):
        one = schedule(measured, _lanes(measured, 1))
        ways.append(("one lane of each kind", one, backend.stream_run))
        ways += [(f"{name}, issued at every call", made, backend.stream_run) for name, made in candidates[:2]]
    return ways


def _lanes(measured: Any, count: int) -> list[Lane]:
    kinds = dict.fromkeys((task.device, task.kind) for task in measured.tasks)
    return [Lane(device, kind, number) for device, kind in kinds for number in range(count if kind == "compute" else 1)]


def _candidates(measured: Any) -> list[tuple[str, Schedule]]:
    """Plans for several numbers of lanes, those first that simulation likes."""
    made = [(f"{count} lanes", schedule(measured, _lanes(measured, count), switch_seconds=1e-6)) for count in _LANES]
    return sorted(made, key=lambda pair: simulate(pair[1], wait_seconds=1e-6).seconds)


def _handed_over(backend: Any, made: Schedule) -> Any:
    return backend.plan_of([lane.kind for lane in made.lanes], made.lane_of, made.order, made.waits)


def _about(made: Schedule) -> list[str]:
    limit = bounds(made)
    lanes = made.per_lane()
    lines = [
        f"  {len(made.graph)} tasks, {sum(map(bool, lanes))} lanes, {made.wait_count()} waits between them",
        *(f"    {lane}: {len(own)} tasks" for lane, own in zip(made.lanes, lanes, strict=True) if own),
        f"  work {made.graph.work() * 1e3:.3f} ms; longest chain {limit.critical_path * 1e3:.3f} ms; busiest device "
        f"{limit.busiest_device * 1e3:.3f} ms",
    ]
    if limit.critical_path >= limit.busiest_device:
        lines.append("  bound by the longest chain: more lanes cannot help")
    else:
        lines.append("  bound by the device: its work fills it, more lanes cannot help")
    return lines
