"""The stream of a device that steps are tried out, warmed up and captured on.

There is one for all trainers, as cuBLAS keeps memory for each stream that it has seen. Trainers in several threads take
turns on it: what another thread gave it while a step is captured would be captured with that step.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps are captured on."""
    return torch.cuda.Stream(device)


@contextmanager
def on(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Within it work goes to the stream, behind what was issued before and before what comes after; None: as it is."""
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
        warnings.simplefilter("ignore")  # PyTorch tells everybody who sets it that it does not see all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
