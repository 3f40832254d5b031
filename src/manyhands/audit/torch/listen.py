"""Connect PyTorch's hooks to the recorder of a whole program."""

from __future__ import annotations

from collections.abc import Callable

import torch

from manyhands.audit.recorder import Recorder
from manyhands.audit.torch import as_if_gpu, hooks
from manyhands.audit.torch.busy import BusyTime
from manyhands.backends.torch import virtual


def listen(recorder: Recorder, warmup: int, at_step: list[Callable[[int], None]]) -> None:
    """Install the hooks; with a profile a virtual device stands in for the GPU."""
    if recorder.profile is not None:
        as_if_gpu.start(recorder, recorder.profile)
    hooks.install()
    hooks.step_listeners.append(lambda who, loop: recorder.step(who, loop=loop))
    if recorder.profile is None:
        at_step.append(BusyTime(recorder, warmup))


def finish(recorder: Recorder) -> None:
    """What is known only at the end."""
    hooks.step_listeners.clear()
    virtual.observers.clear()
    if recorder.profile is not None or not torch.cuda.is_initialized():
        return
    recorder.used_device = True
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    if retries:
        recorder.remarks.append(
            f"the allocator ran out of memory and retried {retries} times, which frees cached memory and waits for the "
            "device: use a smaller batch, or PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
