"""Makes the steps of a job: by replaying CUDA graphs where they can be captured, else as written, and says which."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from manyhands.amounts import count_of
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.data.order import Cursor, Window
from manyhands.training.torch.data.batches import Shard
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.preflight import precision
from manyhands.training.torch.step.build import build_step

if TYPE_CHECKING:
    from manyhands.training.torch.fast.captured_step import CapturedStep
    from manyhands.training.torch.fast.recorder import CudaRecorder
    from manyhands.training.torch.learner import Rank


def recorder_for(device: torch.device) -> CudaRecorder | None:
    """What records the steps of a device; None: nothing does."""
    if device.type != "cuda":
        return None
    from manyhands.training.torch.fast.recorder import CudaRecorder  # jobs on a CPU need nothing of it

    return CudaRecorder(device)


class RankSteps:
    """The plain step of a rank, and the captured one while there is one."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.plain = build_step(rank)
        self.captured: CapturedStep | None = None
        self.half_before: bool | None = None  # whether a resumed job computed in bfloat16
        self.recorder: CudaRecorder | None = None
        self._begun = False
        self._said: str | None = None  # how the steps run, as the user has read it
        self._first_step = 0  # of the epoch

    def build_again(self) -> None:
        """Put the plain step together again, before the first one: an option has come late."""
        self.plain.close()
        self.plain = build_step(self._rank)

    def batches(self, cursor: Cursor) -> Iterator[tuple[Window, Shard | None]]:
        """The remaining batches of the epoch, with this rank's shard of each; a captured step gathers resident data."""
        self._first_step = cursor.step - cursor.batch
        if not self._begun:
            self._begun = True
            self._begin()
        feed = self._rank.feed
        if self.captured is None or not self._has_resident_data:
            yield from feed.batches(cursor)
            return
        windows = feed.windows(cursor)
        self.captured.inputs.begin_epoch(feed.order(cursor.epoch))
        for window in windows:
            yield window, None

    @property
    def _has_resident_data(self) -> bool:
        data = self._rank.data
        return isinstance(data, Arrays) and data.tensors[0].device == self._rank.world.device

    def _begin(self) -> None:
        """Prepare the first step; called when the optimizer has the state of its checkpoint."""
        rank = self._rank
        if rank.settings.step.optimize != "off":
            self.recorder = recorder_for(rank.world.device)
        # Trials run where the step is recorded: cuBLAS keeps memory for every stream that it has seen.
        with contextlib.nullcontext() if self.recorder is None else self.recorder.run_stream():
            precision.set_precision(rank, self.half_before)
        self._prepare_parts()
        if self.recorder is not None:
            from manyhands.training.torch.fast import build

            if (reason := build.why_not(rank)) is not None:
                self._say(f"plain, because {reason}")
            else:
                self._capture()

    def _prepare_parts(self) -> None:
        for part in self.plain.parts:
            part.prepare()

    def begin_anew(self) -> None:
        """Between two epochs: other parameters are trained, or the model is another one to a captured step."""
        for parameter in self._rank.model.parameters():
            parameter.grad = None  # the optimizer would go on with that of a parameter that is trained no more
        is_captured = self.captured is not None
        if self.captured is not None:
            self.captured.close()
        self.captured = None
        self.plain.lay_out_gradients()
        if self.recorder is not None:
            gc.collect()  # the old graphs; PyTorch refuses to record new ones into the memory that they leave
            self.recorder = recorder_for(self._rank.world.device)
        if is_captured:
            self._capture()

    def _capture(self) -> None:
        from manyhands.training.torch.fast import build

        assert self.recorder is not None
        self.captured = build.step_of_rank(self._rank, self.recorder)

    def make(self, window: Window, shard: Shard | None, factor: float | None) -> None:
        """Make the step of a batch; ``factor`` is that of the learning rates."""
        rank, number = self._rank, window.step - self._first_step
        rank.rates.set(factor)
        if self.captured is not None:
            if self.captured(window, shard, number):
                if self._said is None and self.captured.is_recorded:
                    self._say(self._description(self.captured))
                return
            if self.captured.ended is not None:
                self._end_capture(self.captured.ended)
                rank.rates.set(factor)
        if shard is None and self._has_resident_data:
            shard = rank.feed.shard(window)
        # Plain steps between captured ones run on their stream: what a model keeps of a step's graph stays on it.
        recorder = self.recorder if self.captured is not None else None
        with recorder.run_stream() if recorder is not None else contextlib.nullcontext():
            self.plain(shard, window.size, window.step, number)

    def _say(self, how: str) -> None:
        """Tell the user how the steps run, now and in the job's result."""
        self._said = f"the step: {how}"
        self._rank.notes.append(self._said)
        self._rank.announce(self._said)

    def _description(self, captured: CapturedStep) -> str:
        rank, accumulate = self._rank, self._rank.settings.step.accumulate
        kernels = ", kernels compiled" if captured.compiled else ""
        source = "" if self._has_resident_data else ", batches from the loader"
        if rank.size == accumulate == 1:
            return f"one CUDA graph{kernels}{source}"
        parts = f" for each of {count_of(accumulate, 'micro-batch', 'micro-batches')}" if accumulate > 1 else ""
        sums = f", gradients summed over {count_of(rank.size, 'device')} in between" if rank.size > 1 else ""
        return f"CUDA graphs of its passes{parts} and of its update{sums}{kernels}{source}"

    def _end_capture(self, reason: str) -> None:
        """From now on steps are plain."""
        self._say(f"plain, because {reason}")
        if self.captured is not None:
            self.captured.close()
        self.captured = None
        if self._rank.world.device.type == "cuda":
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
