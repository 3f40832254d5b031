"""Deferred results in a model with streams of its own: written on the stream of the pass, and waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


def test_statistics_that_another_stream_reads_are_computed_on_the_main_one(streams: Streams) -> None:
    norm = nn.BatchNorm2d(8)
    with FusedBatchNorms():
        norm(X)  # its result is dropped, its running statistics are not
        with streams.on(streams.other):
            mean = norm.running_mean.clone()
    torch.testing.assert_close(mean, 0.1 * X.mean((0, 2, 3)))


def test_nothing_is_deferred_on_another_stream(streams: Streams) -> None:
    norm, mode = nn.BatchNorm2d(8), FusedBatchNorms()
    with mode, streams.on(streams.other):
        result = norm(X).relu()
    assert not mode.counts
    torch.testing.assert_close(result, functional.batch_norm(X, None, None, training=True).relu())
