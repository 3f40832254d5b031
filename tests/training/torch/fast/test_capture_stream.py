"""The stream that steps are captured on: for all trainers, one after the other."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from captured_step_cases import CPU, without_gpu

from manyhands.training.torch.fast.capture_stream import on, stream_of


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them gives the stream must not get into what the other one captures."""
    without_gpu(monkeypatch)
    stream, inside, met = stream_of(CPU), threading.Event(), threading.Event()

    def other() -> None:
        inside.wait(10)
        with on(stream, CPU):
            met.set()

    thread = threading.Thread(target=other)
    thread.start()
    with on(stream, CPU), on(stream, CPU):
        inside.set()
        assert not met.wait(0.2)
    assert met.wait(10)
    thread.join()


def test_without_a_stream_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: pytest.fail("there is none"))
    with on(None, CPU), contextlib.suppress(KeyError):
        raise KeyError
