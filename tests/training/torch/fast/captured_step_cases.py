"""The way up to a CUDA graph, for machines without a GPU: streams and captures are stood in for by nothing at all."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from training_cases import difference, mlp, vectors

from manyhands.backends.torch import compat
from manyhands.training.torch.data.batches import Shard
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.build import captured_step
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.objective import Supervised
from manyhands.training.torch.step.number_format import NumberFormat
from manyhands.training.torch.step.plain import PlainStep
from manyhands.training.torch.step.running_sums import RunningSums

CPU = torch.device("cpu")
COUNT = 7 * 16  # samples, in batches of 16


class NoStream:
    def __init__(self, _: object = None) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass


class Generator(torch.Generator):
    """Of a GPU, whose state a capture that fails has left unusable. Where there is a GPU, PyTorch seeds it, too."""

    usable = False

    def clone_state(self) -> str:  # type: ignore[override]
        return "anew"

    def graphsafe_set_state(self, state: str) -> None:  # type: ignore[override]
        self.usable = state == "anew"


MODES: list[int | str] = [0]  # what a wait of the host is; the last one counts
GENERATOR = Generator()


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for streams and captures by nothing at all."""

    @contextlib.contextmanager
    def refused(*_: object, **__: object) -> Any:
        yield
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(compat, "end_failed_capture", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **_: object())
    monkeypatch.setattr(torch.cuda, "graph", refused)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: MODES[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", MODES.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (GENERATOR,) * max(1, torch.cuda.device_count()))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    MODES[:], GENERATOR.usable = [0], False


class Failing:
    """A loss that fails at one of its calls, or at some in a row, after the forward pass."""

    def __init__(self, at: int, times: int = 1) -> None:
        self.left, self.times = at, times

    def __call__(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if -self.times < self.left <= 0:
            raise ValueError("not on this device")
        return nn.functional.cross_entropy(scores, y)


def eager_step(net: nn.Module, loss: Any = nn.functional.cross_entropy) -> PlainStep:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    return PlainStep(net, optimizer, Supervised(loss), RunningSums(CPU), CPU, NumberFormat())


def sixteen(data: Arrays, step: int) -> Shard:
    """The samples of a step, in one micro-batch."""
    return Shard((data.take(torch.arange(step * 16, step * 16 + 16)),), (16,))


def graph_step(
    net: nn.Module, steps: int, loss: Any = nn.functional.cross_entropy, *, compiled: bool = False
) -> tuple[GraphStep, PlainStep]:
    """Makes steps as a rank does: from the graph where there is one, else plainly."""
    eager, data = eager_step(net, loss), Arrays(vectors(COUNT))
    graph = captured_step(eager, data, 16, compiled=compiled)
    graph.begin_epoch(torch.arange(COUNT), 0, 0)
    for step in range(steps):
        if not graph(16):
            eager(sixteen(data, step), 16, step)
    return graph, eager


def assert_as_plain_steps(net: nn.Module, eager: PlainStep, steps: int) -> None:
    """Weights, statistics and figures are those of plain steps, with all biases."""
    expected = mlp(norm=True)
    plain = eager_step(expected)
    for step in range(steps):
        plain(sixteen(Arrays(vectors(COUNT)), step), 16, step)
    assert difference(net.state_dict(), expected.state_dict()) < 1e-14
    one, other = eager.metrics.read(), plain.metrics.read()
    assert (one.count, one.correct) == (other.count, other.correct)
