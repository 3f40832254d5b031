"""Work that is forked off to a side lane, and joined before its results are read.

    main lane     allocate ─┬─ gather ── first operations ─┬─ read the results ...
    side lane 1             └─ write the results ──────────┘

The results are allocated on the main lane, before the side lane forks off. So their memory belongs to the main lane,
and what that lane had in it before is over. They are held until the main lane has waited, which it has to do before it
reads them or writes to what the side lane reads.

What the caller notes of the main lane meanwhile is recorded, and at the join the checker proves the order.
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
        self._journal: Journal | None = None  # while the main lane has not waited
        self._held: list[torch.Tensor] = []
        self._memories: frozenset[int] = frozenset()

    @property
    def is_running(self) -> bool:
        """Whether the main lane has still to wait."""
        return self._journal is not None

    def begin(
        self, work: Callable[[], object], *, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        """Issue work to the side lane that reads and writes these tensors alone."""
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
        """The main lane has been given an operation on some memories."""
        if self._journal is not None and (touched := self._memories & (read | written)):
            self._journal.task(_MAIN, Task(name, touched, self._memories & written, self._device))

    def join(self) -> None:
        """The main lane waits, where it has not yet; then nothing needs to be held."""
        if self._journal is None:
            return
        journal, self._journal = self._journal, None
        journal.wait(_MAIN, journal.mark(_SIDE))
        self._lanes.wait(_MAIN, self._lanes.mark(_SIDE))
        journal.task(_MAIN, Task("all after", self._memories, self._memories, self._device))
        self._held, self._memories = [], frozenset()
        self.schedule = journal.schedule()
        check(self.schedule)
