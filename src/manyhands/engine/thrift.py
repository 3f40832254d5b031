"""Waits that are there for memory's sake alone: a lane that runs ahead of others is held back before it takes too much.

On a GPU a lane may use memory again when it knows that all who read it are over. It knows that of other lanes only by
waiting for them, and correctness often needs no such wait: in

    compute    y0 = x @ x    y1 = x @ x    y2 = x @ x    ...
    copy out       y0 to the host    y1 to the host    ...

the copies wait for the products, and no product for a copy, so that all products are held until the end. If only two
may be there at once, ``y2`` waits for the copy of ``y0`` (and then ``y0`` may go), ``y3`` for that of ``y1``. A copy
that is quicker than a product is over by then, and such a wait costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from manyhands.engine.memory import Footprint
from manyhands.engine.schedule import Schedule, needed_waits
from manyhands.engine.simulate import moments


@dataclass(slots=True)
class _Held:
    """A memory that a lane has made, and who is known to touch it: on each lane the last one."""

    size: int
    left: int  # users that are not issued yet
    last: dict[int, int]  # lane: task


class _Walk:
    """What each lane knows to be over, and what it holds, while tasks are issued one after the other."""

    def __init__(self, made: Schedule, footprint: Footprint) -> None:
        self.made, self.footprint = made, footprint
        # Results count from the beginning: when they are there, it is too late to hold anybody back.
        self.held = footprint.given_bytes() + footprint.result_bytes()
        self.stays = footprint.given | footprint.results
        self.place: dict[int, int] = {}
        self.clocks: list[dict[int, int]] = [{} for _ in made.lanes]
        self.after: dict[int, dict[int, int]] = {}  # for each task what its lane knew at its end
        self.memories: dict[int, _Held] = {}
        self.of_lane: list[dict[int, _Held]] = [{} for _ in made.lanes]
        self._users = dict[int, int]()
        for task in made.graph.tasks:
            for memory in task.reads | task.writes:
                self._users[memory] = self._users.get(memory, 0) + 1

    def too_much(self, task: int, most: int) -> int:
        """How many bytes too many are held with what a task makes; none where it makes nothing."""
        new = sum(self.footprint.sizes[memory] for memory in self._new(task))
        return max(0, self.held + new - most) if new else 0

    def over(self, lane: int) -> list[_Held]:
        """What a lane holds though all users have been issued: the oldest first."""
        return [held for held in self.of_lane[lane].values() if not held.left]

    def can_go(self, task: int) -> int:
        """Bytes that the lane of a task could let go by waiting."""
        return sum(held.size for held in self.over(self.made.lane_of[task]))

    def known(self, lane: int) -> int:
        """Bytes that the lane will let go without another wait."""
        return sum(held.size for held in self.over(lane) if not self.unknown(lane, held))

    def _new(self, task: int) -> Iterator[int]:
        for memory in self.made.graph.tasks[task].writes:
            if memory in self.footprint.sizes and memory not in self.stays and memory not in self.memories:
                yield memory

    def learn(self, lane: int, other: int) -> None:
        """The lane waits for a task: it knows what that one's lane knew."""
        for key, value in self.after[other].items():
            self.clocks[lane][key] = max(self.clocks[lane].get(key, -1), value)

    def unknown(self, lane: int, held: _Held) -> list[int]:
        """The users of a memory that the lane does not know to be over."""
        return [task for one, task in held.last.items() if self.clocks[lane].get(one, -1) < self.place[task]]

    def issue(self, task: int) -> None:
        lane = self.made.lane_of[task]
        self.place[task] = self.clocks[lane][lane] = self.clocks[lane].get(lane, -1) + 1
        self.after[task] = dict(self.clocks[lane])
        for memory in list(self._new(task)):
            self.memories[memory] = held = _Held(self.footprint.sizes[memory], self._users[memory], {})
            self.held += held.size
            self.of_lane[lane][memory] = held
        one = self.made.graph.tasks[task]
        for memory in one.reads | one.writes:
            if memory in self.memories:
                self.memories[memory].left -= 1
                self.memories[memory].last[lane] = task
        for memory, held in list(self.of_lane[lane].items()):
            if not held.left and not self.unknown(lane, held):
                self.held -= self.of_lane[lane].pop(memory).size


def thrifty(made: Schedule, footprint: Footprint, most: int) -> Schedule:
    """The schedule with the waits that bring it down to ``most`` bytes, or as near as waits can.

    Every task stays on its lane. Each lane does its tasks in the program's order, as plain execution does, which holds
    least: what is made first is also used up first. They are issued in the order in which they would begin; one that
    makes something new while too much is held waits for the users of what its lane has held longest. Where these have
    not been issued yet, they come first.
    """
    program = tuple(range(len(made.graph)))
    made = replace(made, order=program, waits=needed_waits(made.graph, made.lane_of, program))
    walk, waits = _Walk(made, footprint), dict(made.waits)
    # A wait lets memory go behind its task, not before it: so one task's results may come on top.
    most -= max(
        (sum(footprint.sizes.get(m, 0) for m in task.writes - walk.stays) for task in made.graph.tasks), default=0
    )
    begins = [begin for begin, _ in moments(made)]
    queues = [list(reversed(lane)) for lane in made.per_lane()]
    order: list[int] = []
    while any(queues):
        heads = [queue[-1] for queue in queues if queue]
        heads = [task for task in heads if all(other in walk.place for other in made.waits.get(task, ()))]
        heads.sort(key=begins.__getitem__)
        task = next((one for one in heads if walk.too_much(one, most) <= walk.can_go(one)), heads[0])
        lane = made.lane_of[task]
        for other in made.waits.get(task, ()):
            walk.learn(lane, other)
        for held in walk.over(lane):
            if walk.too_much(task, most) <= walk.known(lane):
                break
            for other in walk.unknown(lane, held):
                waits[task] = (*waits.get(task, ()), other)
                walk.learn(lane, other)
        walk.issue(task)
        order.append(queues[lane].pop())
    return replace(made, order=tuple(order), waits=waits)
