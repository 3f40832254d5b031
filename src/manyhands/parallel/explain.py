"""``explain()``: how a call is run, what bounds it, why it is not faster, its memory, and what would be better."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from manyhands.amounts import count_of
from manyhands.parallel.plan import Plan
from manyhands.schedule.graph import Graph
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.memory import megabytes
from manyhands.schedule.simulate import Bounds, bounds

_NEARLY = 0.8  # of the time: what takes this much is the bottleneck
_SMALL = 20e-6  # seconds; handing over a task costs about as much
_MOST_WRAPPERS = 100  # of a function: one that wraps itself would never end


def name_of(function: Callable[..., object]) -> str:
    """The function's name as its author knows it: without partials and decorators; a module's class."""
    for _ in range(_MOST_WRAPPERS):
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
    return getattr(function, "__name__", type(function).__name__)


def explain(name: str, plan: Plan) -> str:
    """How a graph is run."""
    lines = [f"{name}: run as {plan.how}"]
    width = max((len(str(method)) for method in [*plan.seconds, *plan.predicted]), default=0)
    for method, spent in plan.seconds.items():
        predicted = f", predicted {_ms(plan.predicted[method])}" if method in plan.predicted else ""
        lines.append(f"  {method!s:<{width}} {spent * 1e3:9.3f} ms measured{predicted}")
    for method, seconds in plan.predicted.items():
        if method not in plan.seconds:
            lines.append(f"  {method!s:<{width}} {'':>9}    not measured, predicted {_ms(seconds)}")
    if plan.schedule is not None:
        lines += _about(plan.schedule)
        lines.append(f"  {why_not_faster(plan, plan.schedule)}")
    if plan.peaks is not None:
        peaks = plan.peaks
        lines.append(
            f"  peak memory: {megabytes(peaks.planned)}, {peaks.times:.2f} times plain execution's "
            f"{megabytes(peaks.plain)} (arguments included; predicted)"
        )
    lines += [f"  advice: {hint}" for hint in plan.advice]
    if plan.costs:
        lines.append(f"  {plan.costs}")
    if plan.planning:
        lines.append(f"  planned in {plan.planning}")
    return "\n".join([*lines, *(f"  {note}" for note in plan.notes)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _about(schedule: Schedule) -> list[str]:
    limit = bounds(schedule)
    lanes = schedule.per_lane()
    work = [sum(schedule.graph.tasks[task].seconds for task in numbers) for numbers in lanes]
    waits = [sum(len(schedule.waits.get(task, ())) for task in numbers) for numbers in lanes]
    used = sum(map(bool, lanes))
    return [
        f"  {count_of(len(schedule.graph), 'task')} on {count_of(used, 'lane')} (a lane is a CPU thread or a CUDA "
        f"stream), {count_of(schedule.wait_count(), 'wait')} between lanes",
        *(
            f"    {lane}: {count_of(len(numbers), 'task')}, {_ms(seconds)} of work, {count_of(count, 'wait')}"
            for lane, numbers, seconds, count in zip(schedule.names(), lanes, work, waits, strict=True)
            if numbers
        ),
        f"  work {_ms(schedule.graph.work())}; critical path {_ms(limit.critical_path)}; busiest lane "
        f"{_ms(limit.busiest_lane)}; busiest device {_ms(limit.busiest_device)}",
    ]


def why_not_faster(planned: Plan, schedule: Schedule) -> str:
    """The first thing that would have to change."""
    limit, work = bounds(schedule), schedule.graph.work()
    spent = planned.seconds.get(planned.method)
    if not len(schedule.graph):
        return "why not faster: there is nothing to do"
    if planned.method.is_plain or len(set(schedule.lane_of)) == 1:
        return f"why not faster: {_why_one_lane(planned, limit, work, len(schedule.graph))}"
    return f"why not faster: {_why_no_more(limit, spent, planned.predicted.get(planned.method), schedule)}"


def _why_one_lane(planned: Plan, limit: Bounds, work: float, count: int) -> str:
    if limit.critical_path >= _NEARLY * work:
        return "its tasks depend on each other: the critical path is nearly all of the work, so lanes cannot help"
    if work / count < _SMALL:
        return f"its operations take {work / count * 1e6:.0f} us on average, about the cost of handing one to a lane"
    if limit.busiest_device >= _NEARLY * work:
        return "each operation alone keeps its device busy, so running several at once saves no time"
    if planned.predicted and not planned.predicted.keys() & planned.seconds.keys():
        return "no plan with several lanes was measured: the last lines say why"
    return "lanes were measured, and are not faster on this machine"


def _why_no_more(limit: Bounds, spent: float | None, predicted: float | None, schedule: Schedule) -> str:
    reference = predicted if predicted is not None else spent if spent is not None else limit.busiest_lane
    if limit.critical_path >= _NEARLY * reference:
        reason = "bound by the critical path: more lanes cannot help"
    elif limit.busiest_device >= _NEARLY * reference:
        reason = "bound by the device, which is always busy: more lanes cannot help"
    elif limit.busiest_lane >= _NEARLY * reference:
        reason = "bound by the busiest lane: its tasks cannot be spread more evenly over these lanes"
    else:
        reason = f"the lanes wait for each other ({schedule.wait_count()} waits)"
    if spent is not None and predicted is not None and spent > 1.25 * predicted:
        reason += f"; {_ms(spent - predicted)} more than predicted: launches, waits and contention"
    return reason


def advice(program: Graph, keys: Sequence[str], hint: Callable[[int], str | None], most: int = 3) -> list[str]:
    """Independent operations of the same form that could be one batched operation: those with the most work."""
    depth = [0] * len(program)
    for task, needs in enumerate(program.needs):
        depth[task] = 1 + max((depth[need] for need in needs), default=-1)
    rows: dict[tuple[str, int], int] = {}
    first: dict[str, int] = {}
    for task, key in enumerate(keys):
        rows[key, depth[task]] = rows.get((key, depth[task]), 0) + 1
        first.setdefault(key, task)
    widths: dict[str, list[int]] = {}
    for (key, _), count in rows.items():
        if count > 1:
            widths.setdefault(key, []).append(count)
    lines = []
    for key, counts in sorted(widths.items(), key=lambda pair: -sum(pair[1]) * program.tasks[first[pair[0]]].seconds):
        text = hint(first[key])
        if text is not None:
            places = f", at {len(counts)} places" if len(counts) > 1 else ""
            lines.append(f"{max(counts)} independent{places}: {text}")
    return lines[:most]
