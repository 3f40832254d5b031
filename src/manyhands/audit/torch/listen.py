"""What the auditor of a whole program asks of PyTorch beyond its waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch

from manyhands.amounts import counted
from manyhands.audit.recorder import Recorder
from manyhands.audit.torch import as_if_gpu
from manyhands.audit.torch.busy import BusyTime

_undo = ExitStack()  # what ends with the audit


def begin(recorder: Recorder, warmup: int, at_step: list[Callable[[int], None]]) -> None:
    """Predict every operation, or measure how busy the GPU is."""
    if recorder.speeds is not None:
        _undo.enter_context(as_if_gpu.recording(recorder, recorder.speeds))
    else:
        at_step.append(_undo.enter_context(BusyTime(recorder, warmup)))


def end(recorder: Recorder) -> None:
    """Say how often the allocator had to free memory."""
    _undo.close()
    if recorder.speeds is not None or not torch.cuda.is_initialized():
        return
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    if retries:
        recorder.remarks.append(
            f"the allocator ran out of memory and retried {counted(retries, 'time')}, which frees cached memory and "
            "waits for the device: use a smaller batch, or PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
