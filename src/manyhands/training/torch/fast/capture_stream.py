"""The stream on which a device's steps are tried out, warmed up and captured.

All trainers share it, because cuBLAS keeps memory for every stream that it has run on. Trainers in several threads take
turns: work that another thread issued during a capture would be captured, too.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from manyhands.backends.torch.replacements import Replacements
from manyhands.backends.torch.run.own_streams import new_stream


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps are captured on."""
    return new_stream(device)


def current_stream() -> torch.cuda.Stream | None:
    """The current stream of the current device; None without a GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


@contextmanager
def on(stream: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """A context whose work goes to this stream, ordered with the current stream before and after; None: no change."""
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
def rehearsal() -> Iterator[None]:
    """A context in which code behaves as in a capture: an operation that makes the host wait for the GPU raises.

    Libraries avoid such operations while ``torch.cuda.is_current_stream_capturing()``, so that is True here, too.
    """
    before = torch.cuda.get_sync_debug_mode()
    answers = Replacements()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this mode does not detect every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        answers.replace(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield
    finally:
        answers.undo()
        torch.cuda.set_sync_debug_mode(before)
