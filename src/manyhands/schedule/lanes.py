"""From a graph to a schedule: a lane for every task, a place in its order, and the waits between lanes.

List scheduling in the manner of HEFT (Topcuoglu, Hariri and Wu, 2002): tasks are taken by their upward rank, the length
of the longest chain from them to the end, and each goes to the lane on which it ends first. Among equal lanes it goes
to the lane of the task that it waited for last, so that no wait between lanes is needed there.

A lane runs its tasks in order. A task waits for tasks on other lanes only where nothing else implies it: if c (lane 0)
has waited for b (lane 1), and b for a (lane 2), then c need not wait for a.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from manyhands.schedule.graph import Graph, Kind


@dataclass(frozen=True, slots=True)
class Lane:
    """An ordered queue of work on a device: a stream, a copy engine, a worker thread."""

    device: str
    kind: Kind = "compute"
    number: int = 0

    def __str__(self) -> str:
        return f"{self.device} {self.kind} {self.number}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which lane does which task, in which order everything is issued, and who waits for whom."""

    graph: Graph
    lanes: tuple[Lane, ...]
    lane_of: tuple[int, ...]
    order: tuple[int, ...]
    waits: Mapping[int, tuple[int, ...]]

    def per_lane(self) -> list[list[int]]:
        """The tasks of each lane, in its order."""
        orders: list[list[int]] = [[] for _ in self.lanes]
        for task in self.order:
            orders[self.lane_of[task]].append(task)
        return orders

    def names(self) -> list[str]:
        """The names of the lanes: by device and kind, or by all devices where one lane works for several."""
        if self.is_mixed():
            devices = self.devices()
            held = ", ".join(devices) if len(devices) <= 4 else f"{len(devices)} devices"
            return [f"one lane ({held})"]
        return [str(lane) for lane in self.lanes]

    def devices(self) -> list[str]:
        """The devices of its tasks, the host first: cpu, gpu:0, gpu:1, ..., gpu:10."""
        return sorted({task.device for task in self.graph.tasks}, key=lambda device: (len(device), device))

    def is_mixed(self) -> bool:
        """Whether its only lane does what several lanes could do: tasks of more than one device or kind."""
        return len(self.lanes) == 1 and len({(task.device, task.kind) for task in self.graph.tasks}) > 1

    def wait_count(self) -> int:
        return sum(map(len, self.waits.values()))


def lanes_for(graph: Graph, count: int) -> list[Lane]:
    """``count`` compute lanes for each device of a graph, and one lane for each kind of copy."""
    kinds = dict.fromkeys((task.device, task.kind) for task in graph.tasks)
    return [Lane(device, kind, number) for device, kind in kinds for number in range(count if kind == "compute" else 1)]


def one_lane(graph: Graph) -> Schedule:
    """Everything on one lane in the program's order: it also frees memory in that order."""
    count = len(graph)
    lane = Lane(graph.tasks[0].device, graph.tasks[0].kind) if count else Lane("cpu")
    return Schedule(graph, (lane,), (0,) * count, tuple(range(count)), {})


def schedule(graph: Graph, lanes: Sequence[Lane], *, switch_seconds: float = 0.0) -> Schedule:
    """Give every task of the graph one of the lanes of its device and kind.

    ``switch_seconds`` is the cost of a wait between two lanes.
    """
    choices = _choices(graph, lanes)
    rank = upward_ranks(graph)
    free = [0.0] * len(lanes)
    end = [0.0] * len(graph)
    lane_of = [-1] * len(graph)
    order: list[int] = []
    missing = [len(needs) for needs in graph.needs]
    # At equal rank, the task that can start first: so copies follow the order in which their sources are computed.
    ready = [(-rank[i], 0.0, i) for i in range(len(graph)) if not missing[i]]
    heapq.heapify(ready)
    while ready:
        _, _, index = heapq.heappop(ready)
        task = graph.tasks[index]
        needs = graph.needs[index]
        latest = max(needs, key=end.__getitem__, default=None)

        def start_on(lane: int, needs: frozenset[int] = needs) -> float:
            arrives = [end[need] + (switch_seconds if lane_of[need] != lane else 0.0) for need in needs]
            return max([free[lane], *arrives])

        lanes_of_kind = choices[task.device, task.kind]
        start, _, lane = min((start_on(n), latest is not None and lane_of[latest] != n, n) for n in lanes_of_kind)
        lane_of[index] = lane
        end[index] = free[lane] = start + task.seconds
        order.append(index)
        for follower in graph.followers[index]:
            missing[follower] -= 1
            if not missing[follower]:
                can_start = max(end[need] for need in graph.needs[follower])
                heapq.heappush(ready, (-rank[follower], can_start, follower))
    return _with_waits(graph, lanes, lane_of, order)


def schedule_chains(graph: Graph, lanes: Sequence[Lane], *, switch_seconds: float = 0.0) -> Schedule:
    """Like :func:`schedule`, with every unbranched chain kept together: one lane runs it without interruption.

    What the next task of a chain reads is then still in the lane's cache, fewer chains are alive at once, and little is
    handed over between lanes. A few long chains cannot be balanced this way.
    """
    chains = _chains(graph)
    chain_of = {task: number for number, chain in enumerate(chains) for task in chain}
    needs = [{chain_of[need] for task in chain for need in graph.needs[task]} - {n} for n, chain in enumerate(chains)]
    followers = [{chain_of[f] for task in chain for f in graph.followers[task]} - {n} for n, chain in enumerate(chains)]
    whole = Graph(
        tuple(
            replace(graph.tasks[chain[0]], seconds=sum(graph.tasks[task].seconds for task in chain)) for chain in chains
        ),
        tuple(map(frozenset, needs)),
        tuple(tuple(sorted(of_chain)) for of_chain in followers),
    )
    of_chains = schedule(whole, lanes, switch_seconds=switch_seconds)
    order = [task for chain in of_chains.order for task in chains[chain]]
    lane_of = [of_chains.lane_of[chain_of[task]] for task in range(len(graph))]
    return _with_waits(graph, lanes, lane_of, order)


def schedule_main_lane(graph: Graph, lanes: Sequence[Lane]) -> Schedule:
    """Put all that the end of the longest chain needs on one lane, which waits for no other; the rest on other lanes.

    In a backward pass the path from the loss to the first layer stays together; weight gradients, which nothing waits
    for, go to the other lanes. Tasks are issued in program order, each on the lane on which it can begin first; among
    equal ones, a lane that runs one of its needs comes first.
    """
    chains = graph.chains()
    last = max(range(len(graph)), key=chains.__getitem__, default=0)
    main = {last}
    for index in range(last - 1, -1, -1):
        if not main.isdisjoint(graph.followers[index]):
            main.add(index)
    choices = _choices(graph, lanes)
    free = [0.0] * len(lanes)
    end = [0.0] * len(graph)
    lane_of: list[int] = []
    for index, task in enumerate(graph.tasks):
        needs = graph.needs[index]
        ready = max((end[need] for need in needs), default=0.0)
        of_needs = {lane_of[need] for need in needs}
        first, *others = choices[task.device, task.kind]
        suitable = [first] if index in main or not others else others
        lane = min(suitable, key=lambda lane: (max(free[lane], ready), lane not in of_needs, lane))
        lane_of.append(lane)
        end[index] = free[lane] = max(free[lane], ready) + task.seconds
    return _with_waits(graph, lanes, lane_of, range(len(graph)))


def _with_waits(graph: Graph, lanes: Sequence[Lane], lane_of: Sequence[int], order: Sequence[int]) -> Schedule:
    return Schedule(graph, tuple(lanes), tuple(lane_of), tuple(order), needed_waits(graph.needs, lane_of, order))


def _chains(graph: Graph) -> list[list[int]]:
    """The unbranched chains, needs first: a task joins the chain of its only need if it is the only follower there."""
    chains: list[list[int]] = []
    of: dict[int, list[int]] = {}
    for task, needs in enumerate(graph.needs):
        before = next(iter(needs)) if len(needs) == 1 else None
        if before is not None and len(graph.followers[before]) == 1 and _same_place(graph, before, task):
            chain = of[before]
        else:
            chain = []
            chains.append(chain)
        chain.append(task)
        of[task] = chain
    return chains


def _same_place(graph: Graph, first: int, second: int) -> bool:
    a, b = graph.tasks[first], graph.tasks[second]
    return (a.device, a.kind) == (b.device, b.kind)


def upward_ranks(graph: Graph) -> list[float]:
    """For each task the seconds of the longest chain from it to the end, its own included."""
    rank = [0.0] * len(graph)
    for index in range(len(graph) - 1, -1, -1):
        after = max((rank[follower] for follower in graph.followers[index]), default=0.0)
        rank[index] = graph.tasks[index].seconds + after
    return rank


def needed_waits(
    needs: Sequence[Collection[int]], lane_of: Sequence[int], order: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """The waits between lanes that nothing else implies, for tasks issued in that order."""
    clocks = Clocks(max(lane_of, default=-1) + 1)
    issued = {task: number for number, task in enumerate(order)}
    awaited = {need for task, needed in enumerate(needs) for need in needed if lane_of[need] != lane_of[task]}
    waits: dict[int, tuple[int, ...]] = {}
    for task in order:
        lane = lane_of[task]
        wanted = []
        for need in sorted(needs[task], key=issued.__getitem__, reverse=True):
            other = lane_of[need]
            if other != lane and clocks.known_position(lane, other) < clocks.place[need]:
                wanted.append(need)
                clocks.wait(lane, need)
        if wanted:
            waits[task] = tuple(wanted)
        clocks.issue(lane, task, waited_for=task in awaited)
    return waits


def limit_memory(schedule: Schedule, peak_of: Callable[[Schedule], int], most: int) -> Schedule:
    """The schedule with more waits, so that its peak is at most ``most`` bytes, or as near as waits can bring it.

    On a GPU a lane may reuse memory when it knows that all tasks that read it are done. A lane that copies results to
    the host is waited for by no other, so all results would be held until the end. Therefore every lane runs its tasks
    in program order, and a task waits for all tasks of other lanes that stand a number of places or more before it in
    the program. That number is halved until the memory suffices; at one place the program runs task by task.
    """
    held_back, places = schedule, 2 * len(schedule.graph)
    while places > 1 and (held_back is schedule or peak_of(held_back) > most):
        places //= 2
        held_back = _within(schedule, places)
    return held_back


def _within(schedule: Schedule, places: int) -> Schedule:
    """The schedule in program order, with lanes that are never this many places of the program apart."""
    needs: list[set[int]] = []
    latest: dict[int, int] = {}  # on each lane, of the tasks that stand far enough before
    for task, needed in enumerate(schedule.graph.needs):
        if task >= places:
            latest[schedule.lane_of[task - places]] = task - places
        needs.append({*needed, *latest.values()})
    order = range(len(needs))
    return replace(schedule, order=tuple(order), waits=needed_waits(needs, schedule.lane_of, order))


def _choices(graph: Graph, lanes: Sequence[Lane]) -> dict[tuple[str, Kind], list[int]]:
    choices: dict[tuple[str, Kind], list[int]] = {}
    for number, lane in enumerate(lanes):
        choices.setdefault((lane.device, lane.kind), []).append(number)
    for task in graph.tasks:
        if (task.device, task.kind) not in choices:
            raise ValueError(f"no lane for {task.name}: it needs one for {task.kind} on {task.device}")
    return choices


class Clocks:
    """Vector clocks: for each lane, up to which place every other lane is known to be done, while tasks are issued.

    A wait for a task also brings what the lane of that task knew at its end.
    """

    def __init__(self, lanes: int) -> None:
        self.place: dict[int, int] = {}  # of each issued task on its lane
        self._known: list[dict[int, int]] = [{} for _ in range(lanes)]
        self._known_after: dict[int, dict[int, int]] = {}  # what the lane of each task knew when it ended

    def known_position(self, lane: int, other: int) -> int:
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
