"""Limits the memory of a schedule by additional waits: a lane that runs too far ahead of others is held back.

On a GPU a lane may reuse memory when it knows that all tasks that read it are done. It knows that of other lanes only
by waiting for them, and correctness often needs no such wait: in

    compute    y0 = x @ x    y1 = x @ x    y2 = x @ x    ...
    copy out       y0 to the host    y1 to the host    ...

the copies wait for the products, but no product waits for a copy, so all products are held until the end. If only two
may exist at once, ``y2`` waits for the copy of ``y0`` (which may then be freed), ``y3`` for that of ``y1``. A copy that
is faster than a product is done by then, and such a wait costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

from manyhands.schedule.clocks import Clocks
from manyhands.schedule.lanes import Schedule, needed_waits
from manyhands.schedule.memory import Footprint
from manyhands.schedule.simulate import moments


@dataclass(slots=True)
class _Held:
    """A memory that a lane has made, and who is known to touch it: on each lane the last one."""

    number: int  # the oldest has the least
    size: int
    lane: int
    left: int  # users that are not issued yet
    last: dict[int, int]  # lane: task
    unknown: int = 0  # of the last ones, when all are issued: those that the lane does not know to be over


class _Walk:
    """What each lane knows to be over, and what it holds, while tasks are issued one after the other.

    A memory is looked at when it is made, when its last user is issued and when its lane learns of one, and not at
    every task in between: there may be thousands of both.
    """

    def __init__(self, schedule: Schedule, footprint: Footprint) -> None:
        self.schedule, self.footprint = schedule, footprint
        # Results count from the beginning: when they are there, it is too late to hold anybody back.
        self.held = footprint.input_bytes() + footprint.result_bytes()
        self.stays = footprint.inputs | footprint.results
        self.clocks = Clocks(len(schedule.lanes))
        self.can_go = [
            0 for _ in schedule.lanes
        ]  # bytes that a lane could let go by waiting: all users have been issued
        self.known = [0 for _ in schedule.lanes]  # of these the bytes that it will let go without another wait
        self._memories: dict[int, _Held] = {}
        # Of each lane what could go, the oldest first; and for each other lane, by the places of users there.
        self._over: list[list[tuple[int, _Held]]] = [[] for _ in schedule.lanes]
        self._users_on: list[dict[int, list[tuple[int, int, _Held]]]] = [{} for _ in schedule.lanes]
        self._users = dict[int, int]()
        for task in schedule.graph.tasks:
            for memory in task.reads | task.writes:
                self._users[memory] = self._users.get(memory, 0) + 1

    def too_much(self, task: int, most: int) -> int:
        """How many bytes above the limit a task's results would be; 0 where it makes none."""
        new = sum(self.footprint.sizes[memory] for memory in self._new(task))
        return max(0, self.held + new - most) if new else 0

    def oldest(self, lane: int) -> Iterator[_Held]:
        """What a lane holds only because it does not know enough: the oldest first, each until it is known."""
        over = self._over[lane]
        while over:
            if over[0][1].unknown:
                yield over[0][1]
            else:
                heapq.heappop(over)

    def unknown(self, held: _Held) -> list[int]:
        """The users of a memory that its lane does not know to be over."""
        place, known = self.clocks.place, self.clocks.known
        return [task for lane, task in held.last.items() if known(held.lane, lane) < place[task]]

    def learn(self, lane: int, other: int) -> None:
        """The lane waits for a task: it knows what that one's lane knew."""
        for learned, place in self.clocks.wait(lane, other):
            users = self._users_on[lane].get(learned, [])
            while users and users[0][0] <= place:
                held = heapq.heappop(users)[-1]
                held.unknown -= 1
                self.known[lane] += 0 if held.unknown else held.size

    def issue(self, task: int) -> None:
        lane = self.schedule.lane_of[task]
        self.clocks.issue(lane, task)
        for memory in list(self._new(task)):
            self._memories[memory] = held = _Held(
                len(self._memories), self.footprint.sizes[memory], lane, self._users[memory], {}
            )
            self.held += held.size
        issued = self.schedule.graph.tasks[task]
        for memory in issued.reads | issued.writes:
            if memory in self._memories:
                held = self._memories[memory]
                held.left -= 1
                held.last[lane] = task
                if not held.left:
                    self._used_up(held)
        self.held -= self.known[lane]
        self.can_go[lane] -= self.known[lane]
        self.known[lane] = 0

    def _used_up(self, held: _Held) -> None:
        """All users of a memory have been issued."""
        unknown = self.unknown(held)
        held.unknown = len(unknown)
        self.can_go[held.lane] += held.size
        if not unknown:
            self.known[held.lane] += held.size
            return
        heapq.heappush(self._over[held.lane], (held.number, held))
        for task in unknown:
            users = self._users_on[held.lane].setdefault(self.schedule.lane_of[task], [])
            heapq.heappush(users, (self.clocks.place[task], held.number, held))

    def _new(self, task: int) -> Iterator[int]:
        for memory in self.schedule.graph.tasks[task].writes:
            if memory in self.footprint.sizes and memory not in self.stays and memory not in self._memories:
                yield memory


def thrifty(schedule: Schedule, footprint: Footprint, most: int) -> Schedule:
    """The schedule with the waits that bring it down to ``most`` bytes, or as near as waits can.

    Every task stays on its lane. Each lane does its tasks in the program's order, as plain execution does, which holds
    least: what is made first is also used up first. They are issued in the order in which they would begin; one that
    makes something new while too much is held waits for the users of what its lane has held longest. Where these have
    not been issued yet, they come first.
    """
    program = tuple(range(len(schedule.graph)))
    schedule = replace(schedule, order=program, waits=needed_waits(schedule.graph, schedule.lane_of, program))
    walk, waits = _Walk(schedule, footprint), dict(schedule.waits)
    # A wait lets memory go behind its task, not before it: so one task's results may come on top.
    most -= max(
        (sum(footprint.sizes.get(m, 0) for m in task.writes - walk.stays) for task in schedule.graph.tasks), default=0
    )
    begins = [begin for begin, _ in moments(schedule)]
    queues = [list(reversed(lane)) for lane in schedule.per_lane()]
    order: list[int] = []
    while any(queues):
        heads = [queue[-1] for queue in queues if queue]
        heads = [task for task in heads if all(other in walk.clocks.place for other in schedule.waits.get(task, ()))]
        heads.sort(key=begins.__getitem__)
        task = next(
            (head for head in heads if walk.too_much(head, most) <= walk.can_go[schedule.lane_of[head]]), heads[0]
        )
        lane = schedule.lane_of[task]
        for other in schedule.waits.get(task, ()):
            walk.learn(lane, other)
        too_much = walk.too_much(task, most)
        for held in walk.oldest(lane):
            if too_much <= walk.known[lane]:
                break
            for other in walk.unknown(held):
                waits[task] = (*waits.get(task, ()), other)
                walk.learn(lane, other)
        walk.issue(task)
        order.append(queues[lane].pop())
    return replace(schedule, order=tuple(order), waits=waits)
