"""What is around the passes of a fast step: it gives way to a model that does not bear it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_step_cases import COUNT, assert_as_plain_steps, eager_step, without_gpu
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from training_cases import mlp, vectors

from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.batched_casts import BatchedCasts
from manyhands.training.torch.fast.build import captured_step
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.fast.norms.batch_norm import FusedBatchNorms


def stepped(net: nn.Module, steps: int, loss: Any = nn.functional.cross_entropy) -> tuple[GraphStep, Any]:
    eager, data = eager_step(net, loss), Arrays(vectors(COUNT))
    graph = captured_step(eager, data, 16, fused_norms=True)
    graph.begin_epoch(torch.arange(COUNT), 0, 0)
    for _ in range(steps):
        assert graph(16), graph.ended
    return graph, eager


def refusing(kind: type) -> Callable[..., torch.Tensor]:
    """A loss that does not bear a mode around it."""

    def loss(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if any(isinstance(mode, kind) for mode in _get_current_dispatch_mode_stack()):
            raise NotImplementedError(f"no rule for {kind.__name__}")
        return nn.functional.cross_entropy(scores, y)

    return loss


@pytest.mark.parametrize("kind", [FusedBatchNorms, BatchedCasts])
def test_a_mode_that_is_not_borne_is_left_out(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    without_gpu(monkeypatch)
    net = mlp(norm=True)
    graph, eager = stepped(net, 4, refusing(kind))
    assert_as_plain_steps(net, eager, 4)
    assert "norms" in graph.reasons
    assert "no rule for" in graph.explain()


def test_a_model_that_the_caller_has_compiled_runs_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    calls = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return lambda *values: calls.append(1) or graph(*values)

    graph, _ = stepped(torch.compile(mlp(norm=True), backend=counting), 2)
    assert len(calls) == 2
    assert "norms" not in graph.reasons
