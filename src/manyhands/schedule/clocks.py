"""Vector clocks: for each lane, which tasks of the other lanes are known to be done while tasks are issued.

A lane runs its tasks in order, so one number per lane says what is known of it: all tasks up to that place are done. A
wait for a task also brings what the lane of that task knew at its end. If c (lane 0) has waited for b (lane 1), and b
for a (lane 2), then c and all tasks after it on lane 0 know that a is done.
"""

from __future__ import annotations


class Clocks:
    """The clocks of a number of lanes, and the places of issued tasks."""

    def __init__(self, lanes: int) -> None:
        self.place: dict[int, int] = {}  # of each issued task on its lane
        self._known: list[dict[int, int]] = [{} for _ in range(lanes)]
        self._known_after: dict[int, dict[int, int]] = {}  # what the lane of each task knew when it ended

    def known(self, lane: int, other: int) -> int:
        """The place up to which a lane knows another lane to be done; -1: it knows of no task there."""
        return self._known[lane].get(other, -1)

    def wait(self, lane: int, task: int) -> list[tuple[int, int]]:
        """Let a lane wait for a task. Returns what it learns: other lanes, and the places up to which they are done."""
        known = self._known[lane]
        learned = [(other, place) for other, place in self._known_after[task].items() if place > known.get(other, -1)]
        known.update(learned)
        return learned

    def issue(self, lane: int, task: int, *, waited_for: bool = True) -> None:
        """Issue a lane's next task. ``waited_for``: another lane may wait for it, so a copy of the clock is kept."""
        known = self._known[lane]
        self.place[task] = known[lane] = known.get(lane, -1) + 1
        if waited_for:
            self._known_after[task] = dict(known)
