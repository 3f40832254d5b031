"""How long a GPU works in a step: PyTorch's profiler over the last steps of the warm-up, which do not count."""

from __future__ import annotations

import functools
from typing import Any

import torch

from manyhands.audit import watch
from manyhands.audit.recorder import Recorder
from manyhands.backends.torch import compat

_STEPS = 3


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
