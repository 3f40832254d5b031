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
    """A memory that a lane has allocated, and on each lane the last task so far that touches it."""

    number: int  # by age: the oldest has the lowest
    size: int
    lane: int
    left: int  # users that are not issued yet
    last: dict[int, int]  # lane: task
    unknown: int = 0  # once all users are issued: how many last tasks the lane does not know to be done


class _Walk:
    """Issues tasks one by one, and tracks what each lane knows to be done and what it holds.

    A memory is examined only when it is allocated, when its last user is issued and when its lane learns that a user is
    done: a program may have thousands of tasks and of memories.
    """

    def __init__(self, schedule: Schedule, footprint: Footprint) -> None:
        self.schedule, self.footprint = schedule, footprint
        # Results count from the beginning: once they exist, it is too late to hold a lane back.
        self.held = footprint.input_bytes() + footprint.result_bytes()
        self.stays = footprint.inputs | footprint.results
        self.clocks = Clocks(len(schedule.lanes))
        self.can_go = [0] * len(schedule.lanes)  # bytes that a lane could free by waiting: all users have been issued
        self.known = [0] * len(schedule.lanes)  # of these, the bytes that it frees without another wait
        self._memories: dict[int, _Held] = {}
        # What each lane could free, the oldest first; and the same by the lane of its users, in that lane's order.
        self._over: list[list[tuple[int, _Held]]] = [[] for _ in schedule.lanes]
        self._users_on: list[dict[int, list[tuple[int, int, _Held]]]] = [{} for _ in schedule.lanes]
        self._users = dict[int, int]()
        for task in schedule.graph.tasks:
            for memory in task.reads | task.writes:
                self._users[memory] = self._users.get(memory, 0) + 1

    def too_much(self, task: int, most: int) -> int:
        """How many bytes above the limit the results of a task would be; 0 if it has none."""
        new = sum(self.footprint.sizes[memory] for memory in self._new(task))
        return max(0, self.held + new - most) if new else 0

    def oldest(self, lane: int) -> Iterator[_Held]:
        """Memories that a lane holds only because it does not know their users to be done, the oldest first."""
        over = self._over[lane]
        while over:
            if over[0][1].unknown:
                yield over[0][1]
            else:
                heapq.heappop(over)

    def unknown(self, held: _Held) -> list[int]:
        """The users of a memory that its lane does not know to be done."""
        place, known = self.clocks.place, self.clocks.known
        return [task for lane, task in held.last.items() if known(held.lane, lane) < place[task]]

    def learn(self, lane: int, other: int) -> None:
        """The lane waits for a task, and so learns what the lane of that task knew."""
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


def limit_memory(schedule: Schedule, footprint: Footprint, most: int) -> Schedule:
    """The schedule with more waits, which bring its memory down to ``most`` bytes or as near as waits can.

    Every task stays on its lane. Each lane runs its tasks in program order, as plain execution does: that order holds
    the least, because what is allocated first is also used up first. Tasks are issued in the order in which they would
    begin. A task that allocates while too much is held waits for the users of what its lane has held longest; users
    that are not issued yet are issued first.
    """
    program = tuple(range(len(schedule.graph)))
    schedule = replace(schedule, order=program, waits=needed_waits(schedule.graph, schedule.lane_of, program))
    walk, waits = _Walk(schedule, footprint), dict(schedule.waits)
    # A wait frees memory only after its task, so the results of one task come on top.
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
