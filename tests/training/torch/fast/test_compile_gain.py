"""Whether a step is compiled: what is counted in a step, what follows from it, and what the step then does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_step_cases import COUNT, CPU, assert_as_plain_steps, eager_step, without_gpu
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from training_cases import mlp, vectors

from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast import compile_gain
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.fast.compile_gain import CompileGain, FusibleWork

LONG = 1_000_000  # steps


def counted(work: Callable[[], object], *parameters: torch.Tensor) -> tuple[int, int]:
    with FusibleWork(parameters) as counting:
        work()
    return counting.operations, counting.bytes


def test_operations_that_a_compiler_fuses_count_by_their_bytes() -> None:
    x = torch.rand(10, 10)
    assert counted(lambda: x + x) == (1, 3 * 400)
    assert counted(lambda: x.sum(1)) == (1, 400 + 40)
    assert counted(lambda: x.t().reshape(5, 20)[1:]) == (1, 2 * 400), "the copy counts, views do not"


def test_products_and_casts_of_parameters_count_as_operations_only() -> None:
    x, weight, image, kernel = torch.rand(10, 10), torch.rand(10, 10), torch.rand(1, 2, 5, 5), torch.rand(3, 2, 3, 3)
    assert counted(lambda: x @ weight) == (1, 0)
    assert counted(lambda: nn.functional.conv2d(image, kernel)) == (1, 0)
    assert counted(lambda: weight.bfloat16(), weight) == (1, 0)
    assert counted(lambda: x.bfloat16(), weight) == (1, 400 + 200)


def test_the_backward_pass_counts_too() -> None:
    x = torch.rand(10, 10, requires_grad=True)
    forward, _ = counted(lambda: x.sin().sum())
    both, _ = counted(lambda: x.sin().sum().backward())
    assert both > forward


def test_a_gain_pays_off_from_some_number_of_steps_on() -> None:
    gain = CompileGain(saved_per_step=1e-3, compiling=30)
    assert not gain.pays_off(29_000)
    assert gain.pays_off(31_000)
    assert "29 s in 29,000 steps: it does not pay off" in gain.explain(29_000)


def deciding_step(
    monkeypatch: pytest.MonkeyPatch, steps: int, net: nn.Module, loss: Any = nn.functional.cross_entropy
) -> tuple[GraphStep, Any]:
    """Four steps of a job that has this many."""
    without_gpu(monkeypatch)
    eager = eager_step(net, loss)
    graph = GraphStep(eager, Arrays(vectors(COUNT)), 16, steps, compiled=None, changing_rate=False)
    graph.begin_epoch(torch.arange(COUNT), 0, 0)
    for _ in range(4):
        assert graph(16), graph.ended
    return graph, eager


def test_a_job_that_is_too_short_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    net = mlp(norm=True)
    graph, eager = deciding_step(monkeypatch, 10, net)
    assert graph.compiled is False
    assert "in 10 steps: it does not pay off" in graph.explain()
    assert_as_plain_steps(net, eager, 4)


@pytest.mark.long
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler")
def test_a_long_job_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_gain, "_SECONDS", 0.0)
    monkeypatch.setattr(compile_gain, "_SECONDS_PER_OPERATION", 1e-6)
    torch._dynamo.reset()
    net = mlp(norm=True)
    graph, eager = deciding_step(monkeypatch, LONG, net)
    assert graph.compiled is True, graph.explain()
    assert "kernels compiled" in graph.explain()
    assert "it pays off" in graph.explain()
    assert_as_plain_steps(net, eager, 4)


def test_a_model_that_allows_no_counting_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if any(isinstance(mode, FusibleWork) for mode in _get_current_dispatch_mode_stack()):
            raise NotImplementedError("no rule for FusibleWork")
        return nn.functional.cross_entropy(scores, y)

    net = mlp(norm=True)
    graph, eager = deciding_step(monkeypatch, LONG, net, loss)
    assert graph.compiled is False
    assert "no rule for FusibleWork" in graph.reasons["compiler"]
    assert_as_plain_steps(net, eager, 4)


@pytest.mark.parametrize("at_once", [True, False])  # or only when it is called
def test_a_step_that_cannot_be_compiled_keeps_everything_else(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compile_gain, "_SECONDS", 0.0)
    monkeypatch.setattr(compile_gain, "_SECONDS_PER_OPERATION", 0.0)
    monkeypatch.setattr(GraphStep, "_compiled_forward", fail if at_once else lambda self: fail)
    net = mlp(norm=True)
    graph, eager = deciding_step(monkeypatch, LONG, net)
    assert graph.compiled is False
    assert graph.reasons == {"compiler": "kernels are not compiled (RuntimeError: no compiler)"}
    assert "(RuntimeError: no compiler)" in graph.explain()
    assert_as_plain_steps(net, eager, 4)


def test_the_speed_of_memory_has_a_default() -> None:
    assert compile_gain._memory_speed(CPU) == compile_gain._BYTES_PER_SECOND
