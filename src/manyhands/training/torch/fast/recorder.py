"""Records work in CUDA graphs, to be replayed: the stream for it, a rehearsal before it, signals within it.

All trainers share one stream, because cuBLAS keeps memory for every stream that it has run on. Trainers in several
threads take turns: work that another thread issued during a capture would be captured, too. The graphs of one recorder
share their memory, so none of them may leave anything in it that another one, or a later replay, reads.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import torch

from manyhands.backends.torch.run.graph_nodes import instantiate
from manyhands.backends.torch.run.own_streams import new_stream, reserve_workspaces
from manyhands.backends.torch.run.streams import capture_graph
from manyhands.training.torch.fast.python_state import line_of_error
from manyhands.training.torch.ranks.gradient_sum import Signal

Replay = Callable[[], object]


class NotRecorded(Exception):
    """Work could not be recorded, so it was not done, whatever PyTorch's counters say."""


def error_in_words(error: BaseException) -> str:
    """What went wrong first, and in which line: a capture that fails raises an error of its own at its end."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    line = line_of_error(error)
    return f"{type(error).__name__}: {error}" if line is None else f"{type(error).__name__} in {line}: {error}"


class CudaRecorder:
    """Records CUDA graphs on one device; the tests have a recorder for CPUs, with the same methods."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, stream_of(device)
        self._pool: tuple[int, int] = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream(device)

    def run_stream(self) -> AbstractContextManager[None]:
        """Work within it runs where it would be recorded, in order with the work before and after."""
        return on(self._stream, self._device)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Code behaves as in a capture, and an operation that makes the host wait for the GPU raises.

        Libraries avoid such operations while ``torch.cuda.is_current_stream_capturing()``, so that is True here, too.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that this mode does not detect every wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", _always):
                yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def record(self, work: Callable[[], object]) -> Replay:
        """Record the work that this function issues, which is not done yet; or raise ``NotRecorded``."""
        reserve_workspaces([self._stream], self._device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            with capture_graph(graph, self._device, stream=self._stream, pool=self._pool):
                work()
            instantiate(graph, self._device)
        except Exception as error:
            raise NotRecorded from error
        return graph.replay

    def signal(self) -> Signal:
        """A signal that recorded work gives in each replay."""
        return _EventInGraph(self._beside)


def _always() -> bool:
    return True


class _EventInGraph:
    """An event that a replayed graph records, and that a stream outside of it can wait for."""

    def __init__(self, beside: torch.cuda.Stream) -> None:
        self._event, self._beside = torch.cuda.Event(external=True), beside

    def record(self) -> None:
        self._event.record()

    @contextmanager
    def after(self) -> Iterator[None]:
        self._beside.wait_event(self._event)
        with torch.cuda.stream(self._beside):
            yield


@functools.cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps are captured on."""
    return new_stream(device)


def current_stream() -> torch.cuda.Stream | None:
    """The current stream of the current device; None without a GPU."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


@contextmanager
def on(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """A context whose work goes to this stream, ordered with the current stream before and after."""
    with _turn(device):
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)


@functools.cache
def _turn(device: torch.device) -> threading.RLock:
    return threading.RLock()
