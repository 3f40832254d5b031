"""Work that is forked off to a side lane, and joined before anything reads its results.

    main lane     allocate ─┬─ gather ── first operations ─┬─ read the results ...
    side lane 1             └─ write the results ──────────┘

The results are allocated on the main lane, before the side lane forks off. So their memory belongs to the main lane,
and that lane's earlier uses of it are over. The results are held until the main lane has waited, which it must do
before it reads them or writes to the side lane's inputs.

The main lane's operations in between are recorded with ``note``, and at the join the checker proves the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from manyhands.backends.torch.compat import memory_id
from manyhands.schedule.check import check
from manyhands.schedule.lanes import Lane, Schedule
from manyhands.schedule.recorded import Journal
from manyhands.schedule.task import Task
from manyhands.training.torch.fast.lanes.eager import Lanes

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
