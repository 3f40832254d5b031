"""A capture that fails, inside Dynamo or inside manyhands: plain execution, a note, and nothing is left behind."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from manyhands import torch as mh
from manyhands.backends.torch import compat
from manyhands.backends.torch.capture import whole

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def fail(*arguments: Any, **keywords: Any) -> Any:
    raise ArithmeticError("it broke")


PLACES = {
    "Dynamo traces": "torch._dynamo.symbolic_convert.InstructionTranslatorBase.run",
    "Dynamo ends a graph": "torch._dynamo.output_graph.OutputGraph.compile_and_call_fx_graph",
    "aot_autograd begins": "torch._functorch.aot_autograd.create_aot_state",
    "a graph is rewritten": "manyhands.backends.torch.dynamo.graphs.keep_effects",
    "a graph is split": "manyhands.backends.torch.dynamo.backend._PlannedGraph",
    "a graph is described": "manyhands.backends.torch.dynamo.graphs._as_captured",
    "a graph is planned": "manyhands.parallel.planner.Trials",
    "candidates are tried": "manyhands.parallel.planner.candidates.candidates",
}


def state() -> dict[str, Any]:
    """What other code of the process would notice."""
    from torch._dynamo import config, symbolic_convert
    from torch._dynamo.variables import TensorVariable, builder, optimizer
    from torch._guards import TracingContext

    return {
        "is compiling": torch.compiler.is_compiling(),
        "context": TracingContext.try_get(),
        "dispatch modes": compat.dispatch_mode_stack(),
        "function modes": compat.function_mode_stack(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()),
        "settings": {name: getattr(config, name, None) for name in compat.dynamo._SETTINGS},
        "levels": [logging.getLogger(name).level for name in compat.dynamo._TALKATIVE],
        "Dynamo": (
            TensorVariable.var_getattr,
            optimizer.OptimizerVariable.var_getattr,
            builder.get_static_address_type,
            symbolic_convert.InstructionTranslatorBase.log_graph_break,
        ),
    }


def assert_others_can_capture() -> None:
    x = torch.rand(4, 4)
    for compiled in (torch.compile(lambda x: x.sin() + 1, backend="eager"), mh.parallel(lambda x: x.sin() + 1)):
        torch.testing.assert_close(compiled(x), x.sin() + 1)


@pytest.mark.parametrize("place", PLACES)
def test_a_training_step_runs_as_written(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, seen = nn.Linear(4, 4), list[int]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    @mh.parallel
    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x, before = torch.rand(8, 4), state()
    weights, momentum, losses = [value.detach().clone() for value in net.parameters()], [0.0, 0.0], list[torch.Tensor]()
    with monkeypatch.context() as broken:
        broken.setattr(PLACES[place], fail)
        losses += [step(x).detach() for _ in range(3)]
        notes = step.explain()
    assert len(seen) == 3
    assert "it broke" in notes
    assert state() == before
    assert_others_can_capture()
    for loss in losses:  # by hand
        copies = [weight.clone().requires_grad_() for weight in weights]
        expected = nn.functional.linear(x, *copies).square().mean()
        torch.testing.assert_close(loss, expected.detach())
        gradients = torch.autograd.grad(expected, copies)
        momentum = [0.9 * old + new for old, new in zip(momentum, gradients, strict=True)]
        weights = [weight - 0.1 * speed for weight, speed in zip(weights, momentum, strict=True)]
    for weight, value in zip(weights, net.parameters(), strict=True):
        torch.testing.assert_close(value.detach(), weight)


@pytest.mark.parametrize("where", ["in the function", "behind it"])
def test_a_function_that_cannot_be_traced_whole(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, before = torch.rand(4, 4), state()

    @mh.parallel(pure=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad(), torch.autocast("cpu", enabled=True):
            if where == "in the function" and type(x) is not torch.Tensor:
                fail()
            return x.cos() + 1

    if where == "behind it":
        monkeypatch.setattr(whole, "trace_of_graph", fail)
    torch.testing.assert_close(function(x), x.cos() + 1)
    monkeypatch.undo()
    assert "it broke" in function.explain()
    assert state() == before
    assert_others_can_capture()
