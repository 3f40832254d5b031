"""Measures how fast a device really is: copies to and from it, and matrix products on it.

Each figure is the median of several trials, after a warm-up. Every trial moves or multiplies the same amount and ends
with a synchronisation, so that the time of a launch is never mistaken for that of the work. Sizes grow until a trial is
long enough to be timed. Between two virtual devices the figures are those of copies in the host's memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from manyhands.backends.protocol import Backend, D, M, T

_TRIALS = 5
_LONG_ENOUGH = 0.02  # seconds a trial should take: a clock's noise is then below a percent
_DTYPES = ("float32", "bfloat16")


def speed(backend: Backend[T, D, M], device: D, megabytes: int = 64) -> dict[str, float | None]:
    """Measure one device: bandwidths in GB/s, rates of products in TFLOP/s.

    None where the framework or the machine cannot do it.
    """
    host, kind = backend.cpu(), backend.neutral(device).kind
    apart = kind != "cpu" and not backend.is_on(backend.random((1,), "float32", host), device)
    pinned = apart and kind == "gpu" and backend.CAPABILITIES.pins_memory
    count = megabytes * 2**20 // 4
    figures = {
        "host_to_device": _bandwidth(backend, count, host, device) if apart else None,
        "host_to_device_pinned": _bandwidth(backend, count, host, device, pinned=True) if pinned else None,
        "device_to_host": _bandwidth(backend, count, device, host) if apart else None,
        "device_to_host_pinned": _bandwidth(backend, count, device, host, pinned=True) if pinned else None,
        "device_to_device": _copy_rate(backend, count, device),
    }
    return figures | {f"matmul_{dtype}": _product_rate(backend, device, dtype) for dtype in _DTYPES}


def _bandwidth(backend: Backend[T, D, M], count: int, source: D, target: D, *, pinned: bool = False) -> float:
    """GB/s of moves of `count` float32 numbers; pinned ones are asynchronous moves, waited for."""
    x = backend.random((count,), "float32", source)
    if not pinned:
        return 4e-9 * count / _median(backend, lambda: backend.move(x, target))
    x = backend.pin(x) if backend.neutral(source).kind == "cpu" else x
    return 4e-9 * count / _median(backend, lambda: backend.start_move(x, target).result())


def _copy_rate(backend: Backend[T, D, M], count: int, device: D) -> float:
    """GB/s of copies on the device, counting what is read (as much again is written)."""
    x = backend.random((count,), "float32", device)
    return 4e-9 * count / _median(backend, lambda: backend.copy(x, device))


def _product_rate(backend: Backend[T, D, M], device: D, dtype: str) -> float | None:
    """TFLOP/s of square products, in the first size that is long enough to be timed."""
    best = None
    for size in (32, 128, 256, 512, 1024, 2048, 4096, 8192):
        try:
            a, b = backend.random((size, size), dtype, device), backend.random((size, size), dtype, device)
            seconds = _median(backend, lambda a=a, b=b: backend.matmul(a, b))  # type: ignore[misc]
        except Exception:  # a dtype that this framework or device does not multiply
            return best
        rate = 2e-12 * size**3 / seconds
        best = rate if best is None else max(best, rate)
        if seconds > _LONG_ENOUGH / 4:
            return best
    return best


def _median(backend: Backend[T, D, M], work: Callable[[], object]) -> float:
    """Seconds of one call: as many calls per trial as make it long enough, the median of the trials."""
    work()
    backend.synchronize(None)
    once = _time(backend, work, 1)
    calls = max(1, min(1000, round(_LONG_ENOUGH / max(once, 1e-7))))
    return statistics.median(_time(backend, work, calls) / calls for _ in range(_TRIALS))


def _time(backend: Backend[T, D, M], work: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = work()
    backend.synchronize(None)
    seconds = time.perf_counter() - start
    del result
    return seconds
