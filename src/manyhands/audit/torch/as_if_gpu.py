"""A virtual device stands in for the GPU, so that a laptop shows what would wait on one.

Every operation there is an entry of a predicted timeline: what the host takes to launch it and the device to compute
it, from the measured speeds of a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from manyhands.audit import sites
from manyhands.audit.recorder import Recorder
from manyhands.audit.speeds import DeviceSpeeds
from manyhands.backends.torch import compat, virtual
from manyhands.backends.torch.compat import tree_iter


@contextmanager
def recording(recorder: Recorder, speeds: DeviceSpeeds) -> Iterator[None]:
    """Record what is launched on the virtual device that stands in for a GPU."""

    def launched(*operation: Any) -> None:
        _launched(recorder, speeds, *operation)

    virtual.observers.append(launched)
    try:
        yield
    finally:
        virtual.observers.remove(launched)


def _launched(recorder: Recorder, speeds: DeviceSpeeds, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    results = [value for value in tree_iter(result) if isinstance(value, torch.Tensor)]
    if _is_view(func, tensors, results):
        recorder.launch(0.0, kernel=False)
        return
    recorder.launch(_seconds(speeds, func, args, kwargs, result, tensors + results), _line())


def _is_view(func: Any, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    if compat.schema(func).is_mutable or not results or not tensors:
        return False
    memory = compat.memory_id(results[0])
    return any(compat.memory_id(tensor) == memory for tensor in tensors)


def _seconds(
    speeds: DeviceSpeeds, func: Any, args: Any, kwargs: Any, result: Any, tensors: list[torch.Tensor]
) -> float:
    """By its FLOPs at the rate of a product, or by the bytes that it reads and writes."""
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / (2 * speeds.on_device)
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return moved
    half = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
    try:
        flops = float(count(*args, **kwargs, out_val=result))
    except Exception:  # an operation whose count wants other arguments
        return moved
    return max(moved, flops / (speeds.bfloat16 if half else speeds.float32))


def _line() -> tuple[int, sites.Line] | None:
    """The user's line that launches an operation itself, not through a library, with the run of its function."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if (
            not file.startswith(sites.PACKAGE)
            and not file.endswith(sites.PLUMBING)
            and frame.f_code.co_name != "__torch_function__"
        ):
            break
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or not sites.is_users(frame.f_code):
        return None
    return id(frame), sites.Line(frame.f_code.co_filename, frame.f_lineno)
