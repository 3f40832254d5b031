"""What a graph would freeze, and what cannot be recorded: such steps are plain, and a note says why."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from captured_cases import assert_as_plain, capturing, trained
from cpu_recorder import Rehearsal, Tape
from test_captured_jobs import Batches
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from training_cases import Rows, WithNet, mlp, vectors

from manyhands.training.options import Step
from manyhands.training.torch.fast.small_kernels import SmallKernels


class Stepping(nn.Module):
    """A step of its own, which ``act`` is part of."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.net, self.act, self.calls = mlp(norm=True), act, 0
        self.kept: list[int] = []
        self.last, self.cache, self.rng = torch.zeros(()), None, np.random.default_rng(0)
        self.hidden, self.options = (torch.zeros(()), 1), {"n": [0]}
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        factor = self.act(self, batch_idx, loss)
        return loss if factor is None else loss * factor


def counts(model: Any, *_: Any) -> float:
    model.calls += 1
    return 1 / (1 + model.calls % 2)


def appends(model: Any, *_: Any) -> float:
    model.kept.append(1)
    return 1 / (1 + len(model.kept) % 2)


def keeps(model: Any, _: int, loss: torch.Tensor) -> torch.Tensor:
    before, model.last = model.last, loss.detach()
    return 1 + before


ACTS = {
    "the number is read": (lambda _, number, __: 1 + number % 2, "test_not_captured.py:"),
    "the number as an index": (lambda _, number, __: [1.0, 2.0, 3.0, 4.0, 5.0, 6.0][number], "batch_idx"),
    "a value is read": (lambda _, __, loss: 1.0 if loss.item() > 0 else 2.0, "waits for the device"),
    "a counter": (counts, "Stepping.calls"),
    "a list": (appends, "Stepping.kept"),
    "a counter in a dict": (
        lambda net, *_: net.options.update(n=[net.options["n"][0] + 1]),
        "Stepping.options",
    ),
    "a tensor of the step before": (keeps, "Stepping.last"),
    "a hidden state": (lambda net, _, loss: setattr(net, "hidden", (loss.detach(), 1)), "Stepping.hidden"),
    "a buffer that is replaced": (lambda net, *_: setattr(net, "count", net.count + 1), "Stepping.count"),
    "a toss of Python's": (lambda *_: 1.0 if random.random() < 2 else 2.0, "Python's random"),
    "a toss of NumPy's": (lambda *_: 1.0 if np.random.rand() < 2 else 2.0, "numpy.random"),
    "a toss of the host's": (lambda *_: 1.0 if torch.rand([]).numpy() < 2 else 2.0, "the CPU's"),
    "a toss of its own": (lambda net, *_: 1.0 if net.rng.random() < 2 else 2.0, "random numbers from Stepping.rng"),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_step_that_cannot_be_captured_is_plain(act: str) -> None:
    function, said = ACTS[act]
    captured, result = assert_as_plain(Stepping(function), Rows())
    assert captured.replays == 0
    assert said in next(note for note in result.notes if "the step: plain" in note)


def caches(model: Any, *_: Any) -> Any:
    model.cache = torch.ones(()) if model.cache is None else model.cache
    return model.cache


def counts_in_place(model: Any, *_: Any) -> None:
    model.count.add_(1)


@pytest.mark.parametrize("act", [lambda *_: None, caches, counts_in_place], ids=["nothing", "a cache", "a buffer"])
def test_a_number_that_is_not_read_a_cache_and_a_buffer_are_no_obstacle(act: Any) -> None:
    captured, _ = assert_as_plain(Stepping(act), Rows())
    assert captured.replays > 5


class Reader(WithNet):
    """Takes a dict with a plain number, and reads it."""

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch["x"]), batch["labels"]) * batch["factor"]


def given(factors: list[float]) -> Batches:
    X, y = vectors(16 * len(factors))
    parts = zip(X.split(16), y.split(16), factors, strict=True)
    return Batches([{"x": x, "labels": y, "factor": factor, "names": [str(factor)] * 16} for x, y, factor in parts])


@pytest.mark.parametrize(("factors", "replays"), [([1.0, 2.0] * 6, True), ([float(n) for n in range(18)], False)])
def test_plain_values_that_are_read_tell_graphs_apart(factors: list[float], replays: bool) -> None:
    """Not so the names beside them, which nobody reads."""
    captured, result = assert_as_plain(Reader(), given(factors), max_epochs=2)
    assert bool(captured.replays) is replays
    assert any("plain value of a batch (test_not_captured.py:" in note for note in result.notes) is not replays


class Refusing(nn.Module):
    """Does not bear a mode around its forward pass."""

    def __init__(self, mode: type) -> None:
        super().__init__()
        self.net, self.mode = mlp(norm=True), mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.net(x)
        if any(isinstance(mode, self.mode) for mode in _get_current_dispatch_mode_stack()):
            raise ValueError("not here")
        return scores


@pytest.mark.parametrize("mode", [Rehearsal, Tape])
@pytest.mark.parametrize("options", [{}, {"step": Step(accumulate=2)}], ids=["one graph", "segments"])
def test_a_step_that_fails_before_its_update_is_made_again(mode: type, options: dict[str, Any]) -> None:
    captured, result = assert_as_plain(Refusing(mode), Rows(), **options)
    assert captured.replays <= 1  # the gradients' zeros
    assert any("ValueError in test_not_captured.py:" in note for note in result.notes)


def test_a_mode_that_a_model_does_not_bear_is_left_out() -> None:
    captured, _ = assert_as_plain(Refusing(SmallKernels), vectors())
    assert captured.replays > 5


def test_a_kind_of_batch_that_cannot_be_recorded_is_plain_while_others_are_not() -> None:
    class ReadsShort(WithNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.net(x)
            return scores if len(x) == 16 else scores * (1.0 if scores.sum().item() > 0 else 2.0)

    captured, result = assert_as_plain(ReadsShort(), Rows(), max_epochs=7)
    assert captured.recorded == 1
    assert captured.replays == 7 * 5 - 3
    assert not any("plain" in note for note in result.notes)


def test_an_update_is_not_made_twice() -> None:
    def broken(self: Any, *_: Any) -> None:
        real(self)
        raise ValueError("after the update")

    real = torch.optim.SGD.step
    with capturing(), mock.patch.object(torch.optim.SGD, "step", broken), pytest.raises(ValueError, match="after the"):
        trained(mlp(), Rows())


def test_a_compiler_that_fails_is_left_out() -> None:
    def broken(*_: Any, **__: Any) -> Any:
        def call(*_: Any) -> None:
            raise RuntimeError("there is no C compiler")

        return call

    with mock.patch.object(torch, "compile", broken):
        captured, result = assert_as_plain(mlp(), Rows(), step=Step(optimize="max"))
    assert captured.replays > 5
    assert any("no C compiler" in note for note in result.notes)


def test_a_model_that_the_caller_has_compiled_runs_compiled() -> None:
    calls = []

    def counting(graph: Any, _: Any) -> Any:
        return lambda *values: calls.append(1) or graph(*values)

    captured, _ = assert_as_plain(torch.compile(mlp(), backend=counting), Rows())
    assert calls
    assert captured.replays > 5
