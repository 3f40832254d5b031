"""What the auditor asks of PyTorch beyond its waits: above all, how long a GPU works in a step.

PyTorch's profiler measures that over the last steps of the warm-up, which do not count. Without a GPU a virtual device
stands in for it, so that a laptop shows what would wait on one: every operation there is an entry of a predicted
timeline, what the host takes to launch it and the device to compute it, from the measured speeds of a device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from manyhands.amounts import count_of
from manyhands.audit import sites, watch
from manyhands.audit.recorder import Recorder
from manyhands.audit.speeds import DeviceSpeeds
from manyhands.backends.torch import compat, virtual
from manyhands.backends.torch.compat import tree_iter

_STEPS = 3
_undo = ExitStack()  # what ends with the audit


def begin(recorder: Recorder, warmup: int, at_step: list[Callable[[int], None]]) -> None:
    """Predict every operation, or measure how busy the GPU is."""
    if recorder.speeds is not None:
        _undo.enter_context(predict_times(recorder, recorder.speeds))
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
            f"the allocator ran out of memory and retried {count_of(retries, 'time')}, which frees cached memory and "
            "waits for the device: use a smaller batch, or PYTORCH_ALLOC_CONF=expandable_segments:True"
        )


class BusyTime:
    """Called after each step. Gives way to a profiler of the program: there can be only one."""

    def __init__(self, recorder: Recorder, warmup: int) -> None:
        self._recorder = recorder
        self._first, self._last = max(1, warmup - _STEPS), warmup
        self._profiler: Any = None
        self._give_way = self._last <= self._first  # a warm-up too short to measure in
        self._is_creating = False
        self._original_profiler: Any = None

    def __enter__(self) -> BusyTime:
        if not self._give_way:
            self._watch_profilers()
        return self

    def __exit__(self, *error: object) -> None:
        if self._original_profiler is not None:
            torch.profiler.profile.__init__ = self._original_profiler  # type: ignore[method-assign]
        if self._profiler is not None:  # the program ended in the warm-up
            self._stop()

    def __call__(self, steps: int) -> None:
        with watch.quiet():
            if steps == self._first and not self._give_way:
                self._start()
            elif steps >= self._last and self._profiler is not None:
                steps = self._last - self._first
                busy, kernels = self._stop()
                self._recorder.busy_seconds, self._recorder.kernel_seconds = busy / steps, kernels / steps

    def _start(self) -> None:
        if not torch.cuda.is_initialized() or compat.profiler_enabled():
            return
        self._is_creating = True
        torch.cuda.synchronize()
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._is_creating = False
        profiler.start()
        self._profiler = profiler

    def _stop(self) -> tuple[float, float]:
        """How long the GPU worked; and without copies from and to pageable memory, which are the host's work."""
        profiler, self._profiler = self._profiler, None
        torch.cuda.synchronize()
        profiler.stop()
        spans = [
            (event.time_range.start * 1e-6, event.time_range.end * 1e-6, event.name)
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA"
        ]
        kernels = (span[:2] for span in spans if "Pageable" not in span[2])
        return busy_seconds(span[:2] for span in spans), busy_seconds(kernels)

    def _watch_profilers(self) -> None:
        """A profiler of the program, made before or while ours runs, ends ours for good."""
        owner: Any = torch.profiler.profile
        original = self._original_profiler = owner.__init__

        @functools.wraps(original)
        def __init__(profiler: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_creating:
                self._give_way = True
                if self._profiler is not None:
                    self._stop()
            original(profiler, *args, **kwargs)

        owner.__init__ = __init__


def busy_seconds(spans: Any) -> float:
    """How long at least one of some spans was open.

    >>> busy_seconds([(0.0, 1.0), (0.5, 2.0), (3.0, 4.0)])
    3.0
    """
    busy, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy


# As if there were a GPU


@contextmanager
def predict_times(recorder: Recorder, speeds: DeviceSpeeds) -> Iterator[None]:
    """Record what is launched on the virtual device that stands in for a GPU."""
    note_launch = functools.partial(_launch, recorder, speeds)
    virtual.observers.append(note_launch)
    try:
        yield
    finally:
        virtual.observers.remove(note_launch)


def _launch(recorder: Recorder, speeds: DeviceSpeeds, func: Any, args: Any, kwargs: Any, result: Any) -> None:
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
