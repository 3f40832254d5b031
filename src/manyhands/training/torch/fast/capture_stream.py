"""The stream of a device that steps are tried out, warmed up and captured on.

There is one for all trainers, as cuBLAS keeps memory for each stream that it has seen. Trainers in several threads take
turns on it: work that another thread issues during a capture would be captured, too.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from manyhands.backends.torch.run.own_streams import new_stream


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps are captured on."""
    return new_stream(device)


@contextmanager
def on(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Within it work goes to the stream, ordered with the current one before and after; None: no change."""
    if stream is None:
        yield
        return
    with _turn(device):
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)


@functools.cache
def _turn(device: torch.device) -> threading.RLock:
    return threading.RLock()


@contextmanager
def waits_fail() -> Iterator[None]:
    """Within it an operation that makes the host wait for the GPU is an error, as it would be in a capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this mode does not detect every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
