"""Makes the steps of a job: in a CUDA graph where they can be captured, else as written, and the notes say why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.data.order import Cursor, Window
from manyhands.training.torch.data.batches import Shard
from manyhands.training.torch.preflight.precision import AutoPrecision
from manyhands.training.torch.step.build import build_step

if TYPE_CHECKING:
    from manyhands.training.torch.fast.captured_step import GraphStep
    from manyhands.training.torch.learner import Rank


class Steps:
    """The plain step of a rank, and the captured one while there is one."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.plain = build_step(rank)
        self.captured: GraphStep | None = None
        self.precision = AutoPrecision(rank)
        self._begun = False
        self._first_step = 0  # of the epoch

    def build_again(self) -> None:
        """Put the plain step together again, before the first one: an option has come late."""
        self.plain.close()
        self.plain = build_step(self._rank)

    def batches(self, cursor: Cursor) -> Iterator[tuple[Window, Shard | None]]:
        """The remaining batches of the epoch, with this rank's shard of each; a captured step reads its own."""
        self._first_step = cursor.step - cursor.batch
        if not self._begun:
            self._begun = True
            self._begin()
        if self.captured is None:
            yield from self._rank.feed.batches(cursor)
            return
        self._begin_captured_epoch(cursor.epoch, cursor.sample, cursor.step)
        for window in self._rank.feed.windows(cursor):
            yield window, None

    def _begin(self) -> None:
        """Prepare the first step; called when the optimizer has the state of its checkpoint."""
        rank, reason = self._rank, self._why_not_captured()
        # Trials run on the stream of the capture: cuBLAS keeps memory for every stream that it has seen.
        with contextlib.nullcontext() if reason is not None else _on_capture_stream(rank.world.device):
            self.precision.choose()
        self._prepare_parts()
        if reason is None:
            self.captured = self._new_capture()
            compiled = "compiled" if self.captured.compiled else "not compiled"
            rank.notes.append(f"the whole step in one CUDA graph, kernels {compiled}")
        else:
            rank.notes.append(f"plain steps: {reason}")

    def _prepare_parts(self) -> None:
        for part in self.plain.parts:
            part.prepare()

    def _why_not_captured(self) -> str | None:
        """Why no step of this job can be captured in a CUDA graph."""
        rank, step = self._rank, self._rank.settings.step
        if step.optimize == "off":
            return "optimize='off'"
        if rank.world.device.type != "cuda":
            return "no CUDA graph on a CPU"
        from manyhands.training.torch.fast import build  # only here: jobs on a CPU need nothing of it

        reason = build.why_not(rank.data, rank.optimizer, rank.world, step.accumulate)
        reason = reason or rank.objective.why_not_captured(rank.model)
        return reason or (rank.scheduler.why_not_captured if rank.scheduler is not None else None)

    def _new_capture(self) -> GraphStep:
        from manyhands.training.torch.fast import build

        rank = self._rank
        changing = rank.job.schedule is not None or rank.scheduler is not None
        return build.fast_step(self.plain, rank.data, rank.settings, changing_rate=changing)

    def _begin_captured_epoch(self, epoch: int, sample: int, step: int) -> None:
        if self.captured is not None:
            self.captured.begin_epoch(torch.from_numpy(self._rank.feed.order(epoch)), sample, step)

    def make(self, window: Window, batch: Shard | None, factor: float | None) -> None:
        """Make the step of a batch; ``factor`` is that of the learning rates."""
        is_captured = self.captured is not None

        def begin_again() -> None:
            if is_captured:
                self.captured = self._new_capture()
                self._begin_captured_epoch(window.epoch, window.start, window.step)

        self.precision.step(lambda: self._make(window, batch, factor), begin_again)

    def _make(self, window: Window, shard: Shard | None, factor: float | None) -> None:
        rank = self._rank
        rank.rates.set(factor)
        if self.captured is not None:
            if self.captured(window.size):
                return
            self._end_capture(self.captured.ended)
            rank.rates.set(factor)
        if shard is None and rank.size == 1:
            shard = rank.feed.shard(window)
        self.plain(shard, window.size, window.step, window.step - self._first_step)

    def _end_capture(self, reason: str | None) -> None:
        """From now on steps are plain."""
        self._rank.notes.append(f"plain steps: {reason}")
        self.captured = None
        torch.cuda.synchronize(self._rank.world.device)
        self._rank.rates.restore_options()
        self._prepare_parts()

    def close(self) -> None:
        """Leave the model as it was, and note how the steps ran."""
        rank = self._rank
        if self.captured is not None:
            rank.notes += self.captured.notes()
            if rank.job.run is not None:
                with contextlib.suppress(OSError):  # no disk space: not worth losing a run for
                    RunFolder(rank.job.run.path).write_step(self.captured.explain())
        rank.notes += self.plain.close()


def _on_capture_stream(device: torch.device) -> contextlib.AbstractContextManager[None]:
    from manyhands.training.torch.fast import capture_stream

    return capture_stream.on(capture_stream.stream_of(device), device)
