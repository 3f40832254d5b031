"""The picture of a schedule (``draw``): a column for each lane, a box for each task, a line for each dependency.

Views are left out: they compute nothing, and a task that needs a view needs its base. Dependencies that follow from
others are left out, too. A block of tasks that repeats, each time on the results of the last, is drawn once, in a frame
with its count:

    conv relu conv relu conv relu add   ->   [conv relu] x 3, add

Updates of many weights that wait for the same task, and that nothing needs, are drawn once, too.

On one lane the columns are chains instead, so that branches stand side by side.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from manyhands.files import to_write
from manyhands.schedule.graph import Task
from manyhands.schedule.lanes import Schedule
from manyhands.schedule.timeline import colour_of

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 132, 44, 30, 22, 20
_LONGEST, _LEAST = 12, 3  # the longest block, in tasks; the fewest repetitions that are folded
_IN_LEGEND = 8


@dataclass(frozen=True, slots=True)
class _Block:
    """Tasks of one lane that are drawn once and stand for ``times`` as many."""

    tasks: Sequence[int]
    times: int


def checked_path(path: str | Path) -> Path:
    """The path, if a graph can be written there; an error otherwise."""
    return to_write(path, "draw", (".svg",))


def save(schedule: Schedule, path: str | Path) -> Path:
    path = checked_path(path)
    path.write_text(svg(schedule))
    return path


def svg(schedule: Schedule) -> str:
    groups, names, word = _groups(schedule)
    needs = visible_needs(schedule)
    blocks, drawn_as = _fold(schedule, groups, needs)
    needs = _of_drawn(needs, drawn_as)
    columns, rows = _columns(schedule, groups, needs)
    across = {(need, task) for task, needed in needs.items() for need in needed if groups[need] != groups[task]}
    used = sorted({groups[task] for task in needs})
    legend = _legend(schedule)
    top = _MARGIN + 18 * (len(legend) + bool(across)) + 34
    places = {
        task: (_MARGIN + columns[task] * (_WIDTH + _GAP_X), top + rows[task] * (_HEIGHT + _GAP_Y)) for task in needs
    }
    heights: dict[float, list[float]] = {}
    for left, upper in sorted(places.values()):
        heights.setdefault(left, []).append(upper)
    width = 2 * _MARGIN + max((x for x, _ in places.values()), default=0) + _WIDTH
    height = _MARGIN + max((y for _, y in places.values()), default=top) + _HEIGHT + _GAP_Y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_drawn_legend(legend, word if across else None),
        *_drawn_lanes([(names[group], [places[task] for task in needs if groups[task] == group]) for group in used]),
        *(_drawn_frame(block, places) for block in blocks),
        *(
            _drawn_need(places[need], places[task], heights, crosses=(need, task) in across)
            for task, needed in needs.items()
            for need in sorted(needed)
        ),
        *(_drawn_task(schedule.graph.tasks[task], place) for task, place in places.items()),
    ]
    return "\n".join([*parts, "</svg>"])


# What is drawn


def visible_needs(schedule: Schedule) -> dict[int, set[int]]:
    """For every task that is not a view, the tasks that it needs, without those that follow from other needs."""
    tasks, behind, before = schedule.graph.tasks, dict[int, set[int]](), dict[int, set[int]]()
    for task, needed in enumerate(schedule.graph.needs):
        direct = set[int]().union(*(behind[need] if tasks[need].is_view else {need} for need in needed))
        direct -= set[int]().union(*(before[need] for need in direct))
        behind[task] = direct
        before[task] = direct.union(*(before[need] for need in direct))
    return {task: needed for task, needed in behind.items() if not tasks[task].is_view}


def _groups(schedule: Schedule) -> tuple[Sequence[int], list[str], str]:
    """The group of each task, the groups' names, and the word for a group.

    Groups are lanes, or devices where one lane works for several.
    """
    devices = schedule.devices()
    if schedule.is_mixed() and len(devices) > 1:
        return [devices.index(task.device) for task in schedule.graph.tasks], devices, "device"
    return schedule.lane_of, schedule.names(), "lane"


def _fold(schedule: Schedule, groups: Sequence[int], needs: dict[int, set[int]]) -> tuple[list[_Block], dict[int, int]]:
    """The repeated blocks, and for each task the task that is drawn in its place."""
    described = schedule.graph.tasks
    drawn_as = {task: task for task in needs}
    blocks: list[_Block] = []
    position = {task: place for place, task in enumerate(schedule.order)}
    needed = set[int]().union(*needs.values())
    updates: dict[tuple[int, str, frozenset[int]], list[int]] = {}  # that nothing needs, by what they need
    sequences: dict[int, list[int]] = {}
    for task in sorted(needs, key=position.__getitem__):
        if task not in needed and described[task].name.endswith("_"):
            updates.setdefault((groups[task], described[task].name, frozenset(needs[task])), []).append(task)
        else:
            sequences.setdefault(groups[task], []).append(task)
    for alike in updates.values():
        if len(alike) >= _LEAST:
            blocks.append(_Block(alike[:1], len(alike)))
            drawn_as |= dict.fromkeys(alike, alike[0])
    for tasks in sequences.values():
        words = [(described[task].name, described[task].detail) for task in tasks]
        start = 0
        while start < len(tasks):
            length, times = _repetition(words, tasks, needs, start)
            if times >= _LEAST:
                blocks.append(_Block(tasks[start : start + length], times))
                for number in range(length * times):
                    drawn_as[tasks[start + number]] = tasks[start + number % length]
            start += length * times
    return blocks, drawn_as


def _repetition(
    words: Sequence[object], tasks: Sequence[int], needs: dict[int, set[int]], start: int
) -> tuple[int, int]:
    """Length and count of the block that begins here and repeats immediately; (1, 1) if there is none."""
    best = (1, 1)
    for length in range(1, _LONGEST + 1):
        times, end = 1, start + length
        while words[end : end + length] == words[start : start + length] and end + length <= len(words):
            last = set(tasks[end - length : end])
            if not any(needs[task] & last for task in tasks[end : end + length]):
                break  # it is a branch beside the last one
            times, end = times + 1, end + length
        if times >= _LEAST and length * times > best[0] * best[1]:
            best = (length, times)
    return best


def _of_drawn(needs: dict[int, set[int]], drawn_as: dict[int, int]) -> dict[int, set[int]]:
    """Needs among the tasks that are drawn; from one block to the next of the same kind there is nothing to draw."""
    drawn_needs: dict[int, set[int]] = {}
    for task, needed in needs.items():
        drawn_needs.setdefault(drawn_as[task], set()).update(drawn_as[need] for need in needed)
    return {task: {need for need in needed if need < task} for task, needed in sorted(drawn_needs.items())}


def _columns(
    schedule: Schedule, groups: Sequence[int], needs: dict[int, set[int]]
) -> tuple[dict[int, int], dict[int, int]]:
    """The column and the row of every task: below all that it needs, and below what stands in its column before it.

    A column is a lane; where there is only one, it is a chain, so that branches stand side by side.
    """
    used = sorted({groups[task] for task in needs})
    columns, rows = dict[int, int](), dict[int, int]()
    last: dict[int, int] = {}  # the last task of each column
    position = {task: place for place, task in enumerate(schedule.order)}
    needed = set[int]().union(*needs.values())
    for task in sorted(needs, key=position.__getitem__):
        above = needs[task] & rows.keys()  # of a folded block, a need may stand below
        row = 1 + max((rows[need] for need in above), default=-1)
        if len(used) > 1:
            column = used.index(groups[task])
        else:
            chains = [columns[need] for need in above if last[columns[need]] == need]
            over = [column for column, end in last.items() if end not in needed and rows[end] < row]
            column = min(chains or over, default=len(last))
        if column in last:
            row = max(row, rows[last[column]] + 1)
        columns[task], rows[task], last[column] = column, row, task
    return columns, rows


def _legend(schedule: Schedule) -> list[tuple[str, str]]:
    """The operations with the most work: their colours and words."""
    work: dict[str, tuple[float, int]] = {}
    for task in schedule.graph.tasks:
        if not task.is_view:
            seconds, count = work.get(task.name, (0.0, 0))
            work[task.name] = seconds + task.seconds, count + 1
    most = sorted(work, key=lambda name: -work[name][0])[:_IN_LEGEND]
    return [(colour_of(name), f"{name} x {work[name][1]}: {_time(work[name][0])}") for name in most]


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


# How it is drawn


def _drawn_legend(legend: Sequence[tuple[str, str]], crossing: str | None) -> list[str]:
    parts = []
    for row, (colour, words) in enumerate(legend):
        parts.append(f'<rect x="{_MARGIN}" y="{12 + 18 * row}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{_MARGIN + 18}" y="{22 + 18 * row}">{escape(words)}</text>')
    if crossing:
        row = 18 + 18 * len(legend)
        parts.append(f'<path d="M{_MARGIN} {row} h12" stroke="#c00" stroke-width="1.4"/>')
        parts.append(f'<text x="{_MARGIN + 18}" y="{row + 4}">from one {crossing} to another</text>')
    return parts


def _drawn_lanes(lanes: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> list[str]:
    """A light stripe behind each lane, with its name on top."""
    parts = []
    for name, places in lanes:
        left, right = min(x for x, _ in places) - 8, max(x for x, _ in places) + _WIDTH + 8
        upper = min(y for _, places_of_lane in lanes for _, y in places_of_lane) - 24
        lower = max(y for _, places_of_lane in lanes for _, y in places_of_lane) + _HEIGHT + 8
        parts.append(
            f'<rect x="{left}" y="{upper}" width="{right - left}" height="{lower - upper}" rx="6" fill="#f3f4f6"/>'
            f'<text x="{left + 8}" y="{upper + 15}" font-weight="bold" fill="#444">{escape(name)}</text>'
        )
    return parts


def _drawn_frame(block: _Block, places: Mapping[int, tuple[float, float]]) -> str:
    left, right = min(places[task][0] for task in block.tasks) - 5, max(places[task][0] for task in block.tasks)
    upper, lower = min(places[task][1] for task in block.tasks) - 5, max(places[task][1] for task in block.tasks)
    return (
        f'<rect x="{left}" y="{upper}" width="{right - left + _WIDTH + 5}" height="{lower - upper + _HEIGHT + 5}" '
        'rx="6" fill="none" stroke="#666" stroke-dasharray="4 3"/>'
        f'<text x="{right + _WIDTH + 4}" y="{upper + 12}" fill="#444">x {block.times}</text>'
    )


def _drawn_need(
    start: tuple[float, float], end: tuple[float, float], heights: dict[float, list[float]], *, crosses: bool
) -> str:
    """A curve from one box to another, past all others: through the gap between two rows or two columns.

    ``heights``: where the boxes of each column are, from top to bottom.
    """
    x, y = start[0] + _WIDTH / 2, start[1] + _HEIGHT
    to_x, to_y = end[0] + _WIDTH / 2, end[1]
    colour, thickness = ("#c00", 1.4) if crosses else ("#888", 1.0)
    column = heights[end[0]]
    between = bisect_left(column, end[1]) - bisect_right(column, start[1])  # boxes
    if to_y > y and between <= 0:
        # Down in the column of the end: within the gap below the start if the columns differ.
        upper = min(y + _GAP_Y, to_y)
        path = f"M{x} {y} C{x} {y + 12} {to_x} {upper - 12} {to_x} {upper} L{to_x} {to_y}"
    else:
        beside = to_x + (_WIDTH + _GAP_X) / (-2 if x < to_x else 2)
        path = (
            f"M{x} {y} C{x} {y + 12} {beside} {y + 6} {beside} {y + _GAP_Y} L{beside} {to_y - _GAP_Y} "
            f"C{beside} {to_y - 6} {to_x} {to_y - 12} {to_x} {to_y}"
        )
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{thickness}"/>'


def _drawn_task(task: Task, place: tuple[float, float]) -> str:
    """A box for a task: operation, module, shape and time."""
    x, y = place
    middle = x + _WIDTH / 2
    whole = " ".join(part for part in (task.name, task.module and f"in {task.module}", task.detail) if part)
    small = [_end_of(task.module, 24)] * bool(task.module)
    small.append(_short(", ".join(filter(None, (task.detail, _time(task.seconds)))), 24))
    first = y + (14 if task.module else 19)
    lines = "".join(
        f'<text x="{middle}" y="{first + 12 * number}" text-anchor="middle" fill="white" font-size="10">'
        f"{escape(line)}</text>"
        for number, line in enumerate(small, start=1)
    )
    return (
        f"<g><title>{escape(whole)}: {task.seconds * 1e6:.1f} us on {escape(task.device)}</title>"
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="{colour_of(task.name)}"/>'
        f'<text x="{middle}" y="{first}" text-anchor="middle" fill="white" font-weight="bold">'
        f"{escape(_short(task.name, 18))}</text>{lines}</g>"
    )


def _end_of(path: str, length: int) -> str:
    """The end of a module's path: the beginning is that of its neighbours, too."""
    return path if len(path) <= length else f"…{path[1 - length :]}"
