"""Keeps freed memory of a training on the CPU in the process, for its next step.

Freed memory at the top of the heap goes back to the system, and comes back page by page when the next step needs it:
each page is a fault, in which the system fills it with zeros. Whether that happens depends on what happens to lie at
the top. A small ResNet had from 5,000 to 22,000 faults a step in one program
(``resource.getrusage``, 2 cores of a Xeon, torch 2.13); with this it has
none. GPUs have an allocator that keeps memory, for the same reason.

It changes the C library's malloc for as long as a job runs (glibc only; elsewhere, and where the user has set
``MALLOC_*``, nothing is changed). Afterwards what is free is given back.

PyTorch's tensors are not in that heap on Arm: its builds for Arm have mimalloc, which gives freed memory back after a
tenth of a second or less, and reads its settings only when PyTorch is loaded. Who has longer steps there sets
``MIMALLOC_PURGE_DELAY=-1`` before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
_NEVER = -1
_LARGE = (1 << 30, 32 << 20)  # older versions of glibc refuse more than 32 MB
# Where glibc's own thresholds, which grow with what a program frees, are at last.
_GROWN = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20}

_lock = threading.Lock()
_jobs = 0


@contextlib.contextmanager
def retained() -> Iterator[None]:
    """Meanwhile freed memory stays with the process; may be nested, and used by several threads."""
    keep()
    try:
        yield
    finally:
        release()


def keep() -> None:
    global _jobs
    with _lock:
        _jobs += 1
        library = _glibc() if _jobs == 1 else None
        if library is not None:
            library.mallopt(_TRIM_THRESHOLD, _NEVER)
            any(library.mallopt(_MMAP_THRESHOLD, size) for size in _LARGE)


def release() -> None:
    global _jobs
    with _lock:
        _jobs -= 1
        library = _glibc() if _jobs == 0 else None
        if library is not None:
            for name, size in _GROWN.items():
                library.mallopt(name, size)
            library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if any(name.startswith("MALLOC_") for name in os.environ):
        return None
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt"):
            return library
    return None
