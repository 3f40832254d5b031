"""Weight gradients on side lanes, in parallel with the backward pass, and joined before anything reads them.

A backward pass is a chain: each layer needs the gradient of the layer after it. Nothing in the chain needs the weight
gradients, but PyTorch issues everything on one stream. Here a dispatch mode is active during the backward pass. It
splits a ``convolution_backward`` into two calls with complementary masks: the input's gradient on the main lane, those
of weight and bias on a side lane. Of the two products in a linear layer's backward, it moves the weight's to a side
lane, and likewise the gradient of an embedding. The operations are the same, so the results are equal to the bit.

    main lane     gradient of x3 ──┬── gradient of x2 ──┬── gradient of x1 ─────── join ── update
    side lane 1                    └── gradient of w3 ──│──────────────────────────┤
    side lane 2                                         └── gradient of w2 ────────┘

A gradient goes to a side lane if it leads straight to a parameter without hooks (at most through a cast or a
transposition). Casts, sums of two uses and additions to an older gradient follow it to its lane; before any other
operation on it, the main lane waits.

Memory belongs to the lane that allocated it, and that lane's later work may reuse it as soon as it is freed. So all
memory that a side lane touches is held until the main lane has waited for that lane: at the join, or earlier if more
than ``max_held`` bytes are held. Storages are held, not tensors: autograd copies a gradient into ``.grad`` if it has
other references.

Every operation, mark and wait is recorded, also the work before and after the backward pass. At the join, the checker
proves that every conflicting pair is ordered, including the freeing of memory. That is done each time a step is issued,
in the warm-up and in the capture; replays repeat that order. A compiled step has its lanes in its graph
(:mod:`.compiled`); :class:`StepLanes` has both, for each kind of micro-batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from manyhands.amounts import count_of
from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import TorchDispatchMode, tree_leaves
from manyhands.backends.torch.run.own_streams import own_streams
from manyhands.schedule.check import check
from manyhands.schedule.graph import Task
from manyhands.schedule.lanes import Lane, Schedule
from manyhands.schedule.recorded import Journal
from manyhands.training.torch.fast import operations
from manyhands.training.torch.fast.operations import is_view, written_by

if TYPE_CHECKING:
    from manyhands.training.torch.fast.lanes.compiled import CompiledLanes, MoveToSideLanes

_aten = torch.ops.aten
_MAIN = 0
# Operations that follow a gradient to its lane: autograd applies them on the way to a parameter.
_FOLLOWERS = {_aten._to_copy.default, _aten.add.Tensor, _aten.add_.Tensor, _aten.clone.default}
_Memories = dict[int, torch.UntypedStorage]


class StreamLanes:
    """CUDA streams as lanes: number 0 is the caller's current stream, the others are side lanes.

    ``together``: all work goes to the caller's stream. Then nothing has run on the side lanes before a capture, and
    the workspaces that cuBLAS needs on them are memory of the captured graph.
    """

    def __init__(self, device: torch.device, count: int, main: torch.cuda.Stream) -> None:
        self._device, self.together = device, False
        taken = {main.cuda_stream}
        self._streams: list[torch.cuda.Stream] = []
        while len(self._streams) < count:  # own_streams rotates: the next stream may already be taken
            (stream,) = own_streams(device, 1)
            if stream.cuda_stream not in taken:
                taken.add(stream.cuda_stream)
                self._streams.append(stream)

    def mark(self, lane: int) -> torch.cuda.Event:
        """A point on a lane, after all work issued to it so far."""
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: int, mark: torch.cuda.Event) -> None:
        """Let later work on the lane wait for the mark. The host does not wait."""
        self._stream(lane).wait_event(mark)

    def on(self, lane: int) -> AbstractContextManager[Any]:
        """A context whose operations are issued to this lane."""
        return torch.cuda.stream(self._stream(lane))

    def _stream(self, lane: int) -> torch.cuda.Stream:
        is_main = lane == _MAIN or self.together
        return torch.cuda.current_stream(self._device) if is_main else self._streams[lane - 1]


class SideLanes(TorchDispatchMode):
    """``with SideLanes(lanes, 2): loss.backward()``: weight gradients on two side lanes, all joined at the end."""

    def __init__(
        self, lanes: StreamLanes, count: int, *, max_held: int | None = None, min_product: int = 0, device: str = "cpu"
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lanes, self._count, self._max_held, self._min_product = lanes, count, max_held, min_product
        self._described = [Lane(device, number=number) for number in range(count + 1)]
        self.schedule: Schedule | None = None  # of the last backward pass
        self._begin()

    def _begin(self) -> None:
        self.moved: list[str] = []  # the kinds of gradients on side lanes
        self._journal = Journal(self._described)
        self._journal.task(_MAIN, Task("all before"))
        self._main_count = 1  # tasks on the main lane so far
        self._main_mark: tuple[int, int, Any] | None = None  # tasks before it, its number in the journal, the mark
        self._behind_count = [0] * (self._count + 1)  # how many of the main lane's tasks each lane has waited for
        self._numbers: dict[int, StorageWeakRef] = {}  # weak references keep ids from being reused
        self._created: set[int] = set()
        self._created_on_lanes: set[int] = set()
        self._exclusive: list[set[int]] = [set() for _ in self._described]  # created on a lane and touched by no other
        # For each memory, the lanes that touched it since the main lane last waited for them, and whether they wrote.
        self._touched: dict[int, dict[int, bool]] = {}
        self._held = _Held()

    def __enter__(self) -> SideLanes:
        self._begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        schedule = self._join()
        if kind is None:
            check(schedule)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = operations.side_lane_kind(func, args)
        if kind is None or (func is _aten.mm.default and operations.multiplications(*args) < self._min_product):
            return self._on_its_lane(func, args, kwargs)
        lane = len(self.moved) % self._count + 1  # each side lane in turn
        self.moved.append(kind)
        # The lane forks off here, so that it does not wait for the gradient of a convolution's input.
        self._behind_main(lane)
        if func is not _aten.convolution_backward.default:
            return self._issue(lane, func, args, kwargs)
        *arguments, (for_input, _, for_bias) = args
        first = self._on_its_lane(func, (*arguments, [True, False, False]), kwargs)[0] if for_input else None
        rest = self._issue(lane, func, (*arguments, [False, True, for_bias]), kwargs)
        return (first, *rest[1:])

    def _on_its_lane(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Issue to the main lane, after the side lanes it depends on, or to the lane of the gradient it follows."""
        if is_view(func):
            return func(*args, **kwargs)
        lane = _MAIN
        if func in _FOLLOWERS:
            memories = self._memories((args, kwargs))
            makers = (lane for memory in memories for lane, wrote in self._touched.get(memory, {}).items() if wrote)
            lane = next(makers, _MAIN)
            if lane and not memories.keys() <= self._exclusive[lane]:
                self._behind_main(lane)
        return self._issue(lane, func, args, kwargs)

    def _issue(self, lane: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation on a lane, after the side lanes that touched its memory."""
        read = self._memories((args, kwargs))
        written = self._memories(written_by(func, args, kwargs))
        for memory in read:
            for other, wrote in list(self._touched.get(memory, {}).items()):
                if other != lane and (wrote or memory in written):
                    self._behind(lane, other)
        if lane == _MAIN:
            result = func(*args, **kwargs)
            self._main_count += 1
        else:
            with self._lanes.on(lane):
                result = func(*args, **kwargs)
        created = self._memories(result).keys() - read.keys()
        writes = frozenset(created | written.keys())
        self._journal.task(lane, Task(_short_name(func), frozenset(read), writes, self._described[lane].device))
        self._note(lane, read, created, writes)
        return result

    def _note(self, lane: int, read: _Memories, created: set[int], writes: frozenset[int]) -> None:
        """Record which lane touched which memory; hold storages that must not be freed yet."""
        self._created |= created
        for other, exclusive in enumerate(self._exclusive):
            if other != lane:
                exclusive.difference_update(read)
        if lane == _MAIN:
            self._held.to_the_end += [storage for memory, storage in read.items() if memory in self._created_on_lanes]
            return
        self._created_on_lanes |= created
        self._exclusive[lane] |= created
        for memory in read.keys() | created:
            lanes = self._touched.setdefault(memory, {})
            lanes[lane] = lanes.get(lane, False) or memory in writes
        self._held.to_the_end += [storage for memory, storage in read.items() if memory in self._created_on_lanes]
        mark = None if self._max_held is None else (lane, self._journal.mark(lane), self._lanes.mark(lane))
        self._held.add(
            {memory: storage for memory, storage in read.items() if memory not in self._created_on_lanes}, mark
        )
        if self._max_held is not None:
            self._release_oldest(self._max_held)

    def _release_oldest(self, most: int) -> None:
        """If too much is held, let the main lane wait for the oldest work on side lanes, and release its memory."""
        gone: set[int] = set()
        last: dict[int, tuple[int, Any]] = {}
        while self._held.bytes > most:
            (lane, noted, mark), free = self._held.drop_oldest()
            last[lane] = noted, mark
            gone |= free
        for noted, mark in last.values():
            self._journal.wait(_MAIN, noted)
            self._lanes.wait(_MAIN, mark)
        if gone:
            self._journal.task(_MAIN, Task("let go", writes=frozenset(gone), device=self._described[_MAIN].device))
            self._main_count += 1

    def _behind_main(self, lane: int) -> None:
        if self._behind_count[lane] == self._main_count:
            return
        if self._main_mark is None or self._main_mark[0] != self._main_count:
            self._main_mark = self._main_count, self._journal.mark(_MAIN), self._lanes.mark(_MAIN)
        self._journal.wait(lane, self._main_mark[1])
        self._lanes.wait(lane, self._main_mark[2])
        self._behind_count[lane] = self._main_count

    def _behind(self, lane: int, other: int) -> None:
        """Let later work on the lane wait for all work so far on the other lane, a side lane."""
        self._journal.wait(lane, self._journal.mark(other))
        self._lanes.wait(lane, self._lanes.mark(other))
        if lane == _MAIN:
            for lanes in self._touched.values():
                lanes.pop(other, None)

    def _join(self) -> Schedule:
        """Let the main lane wait for all others, and release all memory."""
        for lane in range(1, self._count + 1):
            if self._journal.count(lane):
                self._behind(_MAIN, lane)
        self._held = _Held()
        everything = frozenset(self._numbers)
        self._journal.task(_MAIN, Task("all after", everything, everything))
        self._journal.rewrite(0, Task("all before", writes=everything - self._created))
        self._numbers = {}
        self.schedule = self._journal.schedule()
        return self.schedule

    def _memories(self, values: Any) -> _Memories:
        """The storages of all tensors in a tree, by their ids."""
        memories: _Memories = {}
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                memories[compat.storage_id(storage)] = storage
                if compat.storage_id(storage) not in self._numbers:
                    self._numbers[compat.storage_id(storage)] = StorageWeakRef(storage)
        return memories


class _Held:
    """Storages that must not be freed yet: some until the join, the others are released oldest first."""

    def __init__(self) -> None:
        self.to_the_end: list[torch.UntypedStorage] = []
        self.bytes = 0
        self._entries: deque[tuple[Any, _Memories]] = deque()
        self._holders: dict[int, int] = {}

    def add(self, memories: _Memories, mark: Any) -> None:
        """``mark``: the point at which the lane that touches these memories is done with them."""
        self._entries.append((mark, memories))
        for memory, storage in memories.items():
            self._holders[memory] = self._holders.get(memory, 0) + 1
            self.bytes += storage.nbytes() if self._holders[memory] == 1 else 0

    def drop_oldest(self) -> tuple[Any, set[int]]:
        """Remove the oldest entry; returns its mark, and the memories that are no longer held."""
        mark, memories = self._entries.popleft()
        free: set[int] = set()
        for memory, storage in memories.items():
            self._holders[memory] -= 1
            if not self._holders[memory]:
                self.bytes -= storage.nbytes()
                free.add(memory)
        return mark, free


def _short_name(func: Any) -> str:
    return str(func).removeprefix("aten.").split(".")[0]


# The lanes of a step


COUNT = 2  # side lanes of a backward pass
# The fewest multiplications for which a product is worth a lane: cuBLAS keeps 33 MB for each stream that it runs on.
_MIN_PRODUCT = 1 << 22


class StepLanes:
    """Side lanes for the steps of one device, separately for each kind of micro-batch."""

    def __init__(
        self, lanes: StreamLanes, device: str = "cpu", *, max_held: int | None = None, min_product: int = 0
    ) -> None:
        self._lanes, self._device = lanes, device
        self._max_held, self._min_product = max_held, min_product
        self._of: dict[Hashable, SideLanes | CompiledLanes] = {}

    @classmethod
    def on_streams(cls, device: torch.device, main: torch.cuda.Stream, *, max_held: int | None = None) -> StepLanes:
        """CUDA streams as lanes, next to the stream that steps are captured on.

        ``max_held``: about how many bytes the lanes may hold that a single lane would already have freed.
        """
        lanes, name = StreamLanes(device, COUNT, main), f"gpu:{device.index or 0}"
        return cls(lanes, name, max_held=max_held, min_product=_MIN_PRODUCT)

    def inductor_pass(self) -> MoveToSideLanes:
        """The pass that adds lanes to the graphs of a compiled step."""
        from manyhands.training.torch.fast.lanes.compiled import MoveToSideLanes

        return MoveToSideLanes(self._max_held, self._min_product)

    def during_backward(self, kind: Hashable, *, compiled: bool) -> AbstractContextManager[Any]:
        """``with lanes.during_backward(kind, compiled=False): loss.backward()``."""
        if kind not in self._of and compiled:
            # Imported here, because it imports the compiler, which takes time.
            from manyhands.training.torch.fast.lanes.compiled import CompiledLanes

            self._of[kind] = CompiledLanes(self._lanes, COUNT, device=self._device)
        elif kind not in self._of:
            limits: dict[str, Any] = {"max_held": self._max_held, "min_product": self._min_product}
            self._of[kind] = SideLanes(self._lanes, COUNT, device=self._device, **limits)
        return self._of[kind]

    @contextmanager
    def on_one_stream(self) -> Iterator[None]:
        """A context in which all lanes use one stream: for warm-up steps."""
        self._lanes.together = True
        try:
            yield
        finally:
            self._lanes.together = False

    def explain(self, kind: Hashable) -> list[str]:
        """The lanes, tasks and waits of a backward pass, and which gradients run on side lanes."""
        lanes = self._of.get(kind)
        if lanes is None or lanes.schedule is None:
            return ["  no backward pass on lanes yet"]
        if not lanes.moved:
            return ["  nothing runs on side lanes: no gradient goes straight to a parameter"]
        schedule = lanes.schedule
        counts = (
            f"{count_of(len(schedule.graph), 'task')} on {count_of(len(schedule.lanes), 'lane')}, "
            f"{count_of(schedule.wait_count(), 'wait')}"
        )
        lines = [f"  backward: {counts}, all checked"]
        for number, (lane, tasks) in enumerate(zip(schedule.lanes, schedule.per_lane(), strict=True)):
            names = Counter(schedule.graph.tasks[task].name for task in tasks)
            most = ", ".join(f"{count} {name}" for name, count in names.most_common(4))
            lines.append(f"    {lane} ({'side' if number else 'main'}): {count_of(len(tasks), 'task')} ({most})")
        lines.append("  in parallel with the backward pass:")
        return lines + [f"    {count} x {kind}" for kind, count in Counter(lanes.moved).items()]
