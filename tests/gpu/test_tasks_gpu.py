"""Explicit tasks on a GPU: they use the stream and the autocast of the thread that gives them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manyhands import torch as mh  # noqa: E402


def test_a_task_uses_the_stream_of_the_thread_that_gave_it() -> None:
    torch.cuda.init()
    stream = torch.cuda.Stream()
    with mh.parallel(threads=1):
        with torch.cuda.stream(stream):
            inside = mh.task(torch.cuda.current_stream)()
        outside = mh.task(torch.cuda.current_stream)()
        assert inside.result() == stream
        assert outside.result() == torch.cuda.current_stream() != stream


def test_a_task_carries_autocast_and_the_default_device() -> None:
    def product() -> tuple[Any, str]:
        x = torch.ones(2, 2)
        return torch.mm(x, x).dtype, x.device.type

    with mh.parallel(threads=1):
        with torch.autocast("cuda", dtype=torch.bfloat16), torch.device("cuda"):
            inside = mh.task(product)()
        assert inside.result() == (torch.bfloat16, "cuda")
        assert mh.task(product)().result() == (torch.float32, "cpu")
