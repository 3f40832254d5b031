"""The side lanes of a fast step, for each batch size, and their description.

In a step that is not compiled, a dispatch mode assigns the lanes (:mod:`.eager`); a compiled step has them in its graph
(:mod:`.compiled`). Casts of weights are forked off to a lane, and joined before anything reads their results::

    main lane     allocate ─┬─ gather ── first operations ─┬─ read the results ...
    side lane 1             └─ write the results ──────────┘

These results are allocated on the main lane, before the side lane forks off. So their memory belongs to the main lane,
and that lane's earlier uses of it are over. They are held until the main lane has waited, which it must do before it
reads them or writes to the side lane's inputs. The order is checked each time a step is issued, in the warm-up and in
the capture; replays repeat that order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from manyhands.amounts import counted
from manyhands.backends.torch.compat import memory_id
from manyhands.schedule.check import check
from manyhands.schedule.lanes import Lane, Schedule
from manyhands.schedule.recorded import Journal
from manyhands.schedule.task import Task
from manyhands.training.torch.fast.lanes.eager import Lanes, SideLanes, StreamLanes

if TYPE_CHECKING:
    from manyhands.training.torch.fast.lanes.compiled import CompiledLanes, MoveToSideLanes

COUNT = 2  # side lanes of a backward pass
# A lane that no pass uses: it never allocates memory that other lanes have freed, and waits for none of them.
_METRICS = COUNT + 1
# The fewest multiplications for which a product is worth a lane: cuBLAS keeps 33 MB for each stream that it runs on.
_MIN_PRODUCT = 1 << 22


class StepLanes:
    """Side lanes for the steps of one device, separately for each batch size."""

    def __init__(self, lanes: Lanes, device: str = "cpu", *, max_held: int | None = None, min_product: int = 0) -> None:
        self._lanes, self._device = lanes, device
        self._max_held, self._min_product = max_held, min_product
        self._of: dict[int, SideLanes | CompiledLanes] = {}
        self.forked = ForkedWork(lanes, device)  # for casts of weights

    @classmethod
    def on_streams(cls, device: torch.device, main: torch.cuda.Stream, *, max_held: int | None = None) -> StepLanes:
        """CUDA streams as lanes, next to the stream that steps are captured on.

        ``max_held``: about how many bytes the lanes may hold that a single lane would already have freed.
        """
        lanes, name = StreamLanes(device, COUNT + 1, main), f"gpu:{device.index or 0}"
        return cls(lanes, name, max_held=max_held, min_product=_MIN_PRODUCT)

    def inductor_pass(self) -> MoveToSideLanes:
        """The pass that adds lanes to the graphs of a compiled step."""
        from manyhands.training.torch.fast.lanes.compiled import MoveToSideLanes

        return MoveToSideLanes(self._max_held, self._min_product)

    def during_backward(self, size: int, *, compiled: bool) -> AbstractContextManager[Any]:
        """``with lanes.during_backward(256, compiled=False): loss.backward()``."""
        if size not in self._of and compiled:
            # Imported here, because it imports the compiler, which takes time.
            from manyhands.training.torch.fast.lanes.compiled import CompiledLanes

            self._of[size] = CompiledLanes(self._lanes, COUNT, device=self._device)
        elif size not in self._of:
            limits: dict[str, Any] = {"max_held": self._max_held, "min_product": self._min_product}
            self._of[size] = SideLanes(self._lanes, COUNT, device=self._device, **limits)
        return self._of[size]

    @contextmanager
    def on_one_stream(self) -> Iterator[None]:
        """A context in which all lanes use one stream: for warm-up steps."""
        lanes = self._lanes
        if not isinstance(lanes, StreamLanes):
            yield
            return
        lanes.together = True
        try:
            yield
        finally:
            lanes.together = False

    def mark(self) -> Any:
        """The current point on the main lane."""
        return self._lanes.mark(0)

    @contextmanager
    def on_metrics_lane(self, mark: Any) -> Iterator[None]:
        """A context whose work runs on a separate lane, after a mark on the main lane; at the end the main lane waits.

        The inputs of the work must be complete at the mark, and must be neither changed nor freed until the end.
        """
        self._lanes.wait(_METRICS, mark)
        try:
            with self._lanes.on(_METRICS):
                yield
        finally:
            self._lanes.wait(0, self._lanes.mark(_METRICS))

    def explain(self, size: int) -> list[str]:
        """The lanes, tasks and waits of a backward pass, and which gradients run on side lanes."""
        lanes = self._of.get(size)
        if lanes is None or lanes.schedule is None:
            return ["  no backward pass on lanes yet"]
        if not lanes.moved:
            return ["  nothing runs on side lanes: no gradient goes straight to a parameter"]
        schedule = lanes.schedule
        counts = (
            f"{counted(len(schedule.graph), 'task')} on {counted(len(schedule.lanes), 'lane')}, "
            f"{counted(schedule.wait_count(), 'wait')}"
        )
        lines = [f"  backward: {counts}, all checked"]
        for number, (lane, tasks) in enumerate(zip(schedule.lanes, schedule.per_lane(), strict=True)):
            names = Counter(schedule.graph.tasks[task].name for task in tasks)
            most = ", ".join(f"{count} {name}" for name, count in names.most_common(4))
            lines.append(f"    {lane} ({'side' if number else 'main'}): {counted(len(tasks), 'task')} ({most})")
        lines.append("  in parallel with the backward pass:")
        return lines + [f"    {count} x {kind}" for kind, count in Counter(lanes.moved).items()]


_MAIN, _SIDE = 0, 1


class ForkedWork:
    """``forked.begin(work, reads=inputs, writes=results)``, then ``forked.join()`` before anyone reads the results."""

    def __init__(self, lanes: Lanes, device: str = "cpu") -> None:
        self._lanes, self._device = lanes, device
        self.schedule: Schedule | None = None  # of the last pass
        self._journal: Journal | None = None  # None once the main lane has waited
        self._held: list[torch.Tensor] = []
        self._memories: frozenset[int] = frozenset()

    @property
    def is_running(self) -> bool:
        """Whether the main lane still has to wait."""
        return self._journal is not None

    def begin(
        self, work: Callable[[], object], *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Issue work to the side lane; it may read and write only these tensors."""
        read, written = (frozenset(map(memory_id, tensors)) for tensors in (reads, writes))
        self._held, self._memories = [*reads, *writes], read | written
        journal = self._journal = Journal([Lane(self._device, number=number) for number in (_MAIN, _SIDE)])
        journal.task(_MAIN, Task("all before", writes=self._memories, device=self._device))
        journal.wait(_SIDE, journal.mark(_MAIN))
        self._lanes.wait(_SIDE, self._lanes.mark(_MAIN))
        try:
            with self._lanes.on(_SIDE):
                work()
            journal.task(_SIDE, Task("work on the side lane", read, written, self._device))
        except BaseException:
            self.join()
            raise

    def note(self, name: str, read: set[int], written: set[int]) -> None:
        """Record an operation that the main lane was given, and the memories it reads and writes."""
        if self._journal is not None and (touched := self._memories & (read | written)):
            self._journal.task(_MAIN, Task(name, touched, self._memories & written, self._device))

    def join(self) -> None:
        """Let the main lane wait, unless it already has, and release the tensors."""
        if self._journal is None:
            return
        journal, self._journal = self._journal, None
        journal.wait(_MAIN, journal.mark(_SIDE))
        self._lanes.wait(_MAIN, self._lanes.mark(_SIDE))
        journal.task(_MAIN, Task("all after", self._memories, self._memories, self._device))
        self._held, self._memories = [], frozenset()
        self.schedule = journal.schedule()
        check(self.schedule)
