"""``precision="auto"`` in a job: chosen before the first step, and proved by it.

:mod:`..preflight.precision` chooses. On one device nothing has shown yet that the model can compute in bfloat16: if the
first step fails before its update, it is made again in float32, and a note says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from manyhands.errors import ManyhandsError
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.torch.preflight import precision
from manyhands.training.torch.state import job_state

if TYPE_CHECKING:
    from manyhands.training.torch.learner import Rank


class AutoPrecision:
    """The precision of a rank's steps, where the user leaves it to the trainer."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._note = ""  # of the rank's notes, the one that a later one replaces
        self._unproven = False
        self.half_before: bool | None = None  # whether a resumed job computed in bfloat16

    def choose(self) -> None:
        """The same on all ranks; a resumed job keeps its own."""
        rank = self._rank
        if rank.settings.precision != "auto":
            return
        if rank.number_format.dtype is torch.float64:
            self._report(precision.Choice("fp64", precision.CONTINUED))
            return
        choice = precision.choose(rank.job, rank.model, rank.world, self.half_before)
        self._report(choice)
        self._unproven = choice.bf16 and rank.size == 1
        if choice.bf16:
            wanted, number_format = precision.bf16_format(rank.model), rank.number_format
            number_format.autocast, number_format.channels_last = wanted.autocast, wanted.channels_last
            if wanted.channels_last:
                rank.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                job_state.settle(rank.optimizer)

    def _report(self, choice: precision.Choice) -> None:
        rank = self._rank
        rank.notes = [str(choice), *(note for note in rank.notes if note != self._note)]
        self._note = str(choice)
        if rank.job.run is not None and rank.world.first:
            RunFolder(rank.job.run.path).record_precision(choice.precision, choice.why)

    def step(self, make: Callable[[], None], begin_again: Callable[[], None]) -> None:
        """Make a step; the first one in float32 if it fails in bfloat16, after ``begin_again()``."""
        if not self._unproven:
            make()
            return
        self._unproven = False
        rank = self._rank
        before, notes = precision.BeforeStep(rank.steps.plain), list(rank.notes)
        try:
            make()
        except (ManyhandsError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not before.put_back():
                raise
            choice = precision.refused(rank.model, error)
        else:
            return
        rank.notes, rank.number_format.autocast = notes, None
        begin_again()
        make()
        self._report(choice)
