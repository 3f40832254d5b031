"""A graph as a picture: tasks from top to bottom by what they need, coloured by lane, or by device."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from manyhands.schedule.lanes import Schedule
from manyhands.schedule.output_path import to_write

_COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#76b7b2",
    "#edc948",
    "#b07aa1",
    "#9c755f",
    "#ff9da7",
    "#bab0ac",
)
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 110, 24, 14, 26


def place(path: str | Path) -> Path:
    """The path, if a graph can be written there; else a lesson."""
    return to_write(path, "draw", (".svg",))


def save(schedule: Schedule, path: str | Path) -> Path:
    path = place(path)
    path.write_text(svg(schedule))
    return path


def svg(schedule: Schedule) -> str:
    """Boxes for tasks, lines for needs, a legend of lanes."""
    groups, names, word = _groups(schedule)
    places = _places(schedule, groups)
    legend = sorted(set(groups))
    top = 40 + 20 * len(legend)
    width = 40 + max((x for x, _ in places), default=0) + _WIDTH
    height = top + 40 + max((y for _, y in places), default=0) + _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, group in enumerate(legend):
        parts.append(f'<rect x="20" y="{12 + 20 * row}" width="14" height="14" fill="{_colour(group)}"/>')
        parts.append(f'<text x="40" y="{23 + 20 * row}">{escape(names[group])}</text>')
    row = 22 + 20 * len(legend)
    parts.append(f'<line x1="20" y1="{row - 4}" x2="34" y2="{row - 4}" stroke="#c00" stroke-width="1.2"/>')
    parts.append(f'<text x="40" y="{row}">from one {word} to another</text>')
    for task, needs in enumerate(schedule.graph.needs):
        x, y = places[task]
        for need in sorted(needs):
            a, b = places[need]
            across = groups[need] != groups[task]
            parts.append(
                f'<line x1="{20 + a + _WIDTH / 2}" y1="{top + b + _HEIGHT}" x2="{20 + x + _WIDTH / 2}" y2="{top + y}" '
                f'stroke="{"#c00" if across else "#999"}" stroke-width="{1.2 if across else 0.8}"/>'
            )
    for task, (x, y) in enumerate(places):
        one = schedule.graph.tasks[task]
        parts.append(
            f"<g><title>{escape(one.name)}: {one.seconds * 1e6:.1f} us on {escape(one.device)}</title>"
            f'<rect x="{20 + x}" y="{top + y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" '
            f'fill="{_colour(groups[task])}"/>'
            f'<text x="{20 + x + _WIDTH / 2}" y="{top + y + 16}" text-anchor="middle" fill="white">'
            f"{escape(one.name[:17])}</text></g>"
        )
    return "\n".join([*parts, "</svg>"])


def _groups(schedule: Schedule) -> tuple[Sequence[int], list[str], str]:
    """What has a colour of its own: the number of each task's group, the groups' names, and what they are.

    Lanes; but on one lane that works for several devices all would look alike, so there it is devices.
    """
    devices = schedule.devices()
    if schedule.is_mixed() and len(devices) > 1:
        return [devices.index(task.device) for task in schedule.graph.tasks], devices, "device"
    return schedule.lane_of, schedule.names(), "lane"


def _colour(lane: int) -> str:
    return _COLOURS[lane % len(_COLOURS)]


def _places(schedule: Schedule, groups: Sequence[int]) -> list[tuple[float, float]]:
    """A row for each length of the longest chain before a task; in a row, groups side by side."""
    depth = [0] * len(schedule.graph)
    for task, needs in enumerate(schedule.graph.needs):
        depth[task] = 1 + max((depth[need] for need in needs), default=-1)
    rows: dict[int, list[int]] = {}
    for task in range(len(schedule.graph)):
        rows.setdefault(depth[task], []).append(task)
    places: list[tuple[float, float]] = [(0.0, 0.0)] * len(schedule.graph)
    for row, tasks in rows.items():
        for column, task in enumerate(sorted(tasks, key=lambda one: (groups[one], one))):
            places[task] = (column * (_WIDTH + _GAP_X), row * (_HEIGHT + _GAP_Y))
    return places
