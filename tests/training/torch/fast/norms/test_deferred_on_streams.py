"""Deferred results in a model with streams of its own: written on the stream of the pass, and waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from manyhands.training.torch.fast.norms import pending
from manyhands.training.torch.fast.norms.batch_norm import FusedBatchNorms


class Stream:
    """A stream that computes nothing: it only records what it waits for."""

    def __init__(self) -> None:
        self.waits: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)


class Streams:
    """A main stream and another one, one of which is current; and the streams that results were written on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main, self.other = Stream(), Stream()
        self.current = self.main
        self.written_on: list[Stream] = []
        self.waits_in_backward: list[Stream] = []
        write = pending.Note.write

        def written(note: pending.Note) -> None:
            if note.tensor() is not None:
                self.written_on.append(self.current)
            write(note)

        monkeypatch.setattr(pending, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(pending.Note, "write", written)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class _OnAnotherStream(torch.autograd.Function):
    """Triples, and so its gradient, on another stream."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, streams: Streams) -> torch.Tensor:
        context.streams = streams
        with streams.on(streams.other):
            return x * 3

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        streams = context.streams
        before = len(streams.other.waits)
        with streams.on(streams.other):
            result = gradient * 3
        streams.waits_in_backward = streams.other.waits[before:]
        return result, None


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


X = torch.rand(6, 8, 4, 4, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)


def test_another_stream_waits_for_a_result_that_it_reads(streams: Streams) -> None:
    norm = nn.BatchNorm2d(8)
    with FusedBatchNorms():
        y = norm(X)
        with streams.on(streams.other):
            result = y.sigmoid()
            again = y.sigmoid()
    assert streams.written_on == [streams.main]
    assert streams.other.waits == [streams.main], "once: the result is there the second time"
    torch.testing.assert_close(result, functional.batch_norm(X, None, None, training=True).sigmoid())
    assert torch.equal(result, again)


def test_another_stream_waits_for_what_the_main_stream_wrote_late(streams: Streams) -> None:
    """The model's own wait may have come before the write."""
    norm = nn.BatchNorm2d(8)
    with FusedBatchNorms():
        y = norm(X)
        y.sigmoid()
        assert streams.written_on == [streams.main]
        with streams.on(streams.other):
            y.sigmoid()
            y.sigmoid()
    assert streams.other.waits == [streams.main]


def test_gradients_that_a_kernel_writes_for_another_reader(streams: Streams) -> None:
    """From the second step on one kernel computes BatchNorm's backward and writes the gradient for the shortcut."""
    norm, mode = nn.BatchNorm2d(8), FusedBatchNorms()
    x = X.clone().requires_grad_()
    for _ in range(3):
        mode.begin(poison=True)
        with mode:
            shortcut = _OnAnotherStream.apply(x, streams)  # first, so that its backward comes last
            loss = functional.relu(norm(x) + shortcut).square().sum()
            with streams.on(streams.other):
                X.sigmoid()  # has waited for all writes of the forward pass
        with mode:
            loss.backward()
        assert streams.waits_in_backward == [streams.main]


def test_work_that_reads_no_deferred_result_waits_for_nothing(streams: Streams) -> None:
    norm = nn.BatchNorm2d(8)
    with FusedBatchNorms():
        y = norm(X)
        with streams.on(streams.other):
            X.sigmoid()
        result = y.relu()
        del y
    assert not streams.other.waits
    assert not streams.written_on, "one kernel wrote the ReLU's result"
    torch.testing.assert_close(result, functional.batch_norm(X, None, None, training=True).relu())


def test_another_stream_waits_for_statistics_of_a_result_that_was_dropped(streams: Streams) -> None:
    norm = nn.BatchNorm2d(8)
    with FusedBatchNorms():
        norm(X)
        with streams.on(streams.other):
            mean = norm.running_mean.clone()
    assert streams.other.waits == [streams.main]
    torch.testing.assert_close(mean, 0.1 * X.mean((0, 2, 3)))


def test_nothing_is_deferred_on_another_stream(streams: Streams) -> None:
    norm, mode = nn.BatchNorm2d(8), FusedBatchNorms()
    with mode, streams.on(streams.other):
        result = norm(X).relu()
    assert not mode.counts
    torch.testing.assert_close(result, functional.batch_norm(X, None, None, training=True).relu())
