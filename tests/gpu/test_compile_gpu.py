"""Compiled regions on lanes of a real GPU: every result and gradient is what plain execution gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manyhands import torch as mh  # noqa: E402
from manyhands.backends import torch_call, torch_fuse  # noqa: E402
from manyhands.backends import torch_parallel as backend  # noqa: E402
from manyhands.engine.costs import costs  # noqa: E402
from manyhands.engine.graph import graph  # noqa: E402
from manyhands.engine.schedule import lanes_for, schedule  # noqa: E402
from manyhands.training.torch import models  # noqa: E402

nn = torch.nn
DEVICE = "cuda:0"


def step_of(net: Any, cast: bool) -> Callable[..., Any]:
    def step(x: Any, y: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            answer = net(x)
        loss = nn.functional.cross_entropy(answer.float(), y)
        return loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))

    return step


def problem(name: str, cast: bool) -> tuple[Callable[..., Any], Any, Any]:
    torch.manual_seed(0)
    net = models.MODELS[name]().to(DEVICE)
    return step_of(net, cast), torch.rand(16, 1, 28, 28, device=DEVICE), torch.arange(16, device=DEVICE) % 10


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", ["lenet", "small-resnet", "resnet18"])
def test_each_gradient_of_a_fused_step(name: str, cast: bool) -> None:
    """On four lanes, in one CUDA graph, replayed: not one gradient may be off, also not to zero."""
    step, x, y = problem(name, cast)
    call = torch_call.call((x, y), {})
    found = torch_call.trace(step, call)
    fused = torch_fuse.fuse(found)
    device = backend.device_of(call, fused)
    measured = graph(costs(backend, fused, device).tasks)
    made = schedule(measured, lanes_for(measured, 4), switch_seconds=1e-6)
    run = backend.graph_run(fused, backend.plan_of(made), call.tensors, device)
    wanted = step(x, y)
    for _ in range(3):
        results = [one.clone() for one in run.replay(call.tensors)]
        limit = 0.1 if cast else 1e-3
        largest = max(float(one.norm()) for one in wanted)
        for one, other in zip(results, wanted, strict=True):
            # Biases before a BatchNorm are zero but for noise: that is measured against the largest gradient.
            assert float((one - other).norm()) <= limit * max(float(other.norm()), 1e-3 * largest)


@pytest.mark.parametrize("name", ["lenet", "small-resnet"])
def test_parallel_compiles_and_tells(name: str) -> None:
    step, x, y = problem(name, False)
    fast = mh.parallel(step, compile=True)
    for _ in range(2):
        for one, other in zip(fast(x, y), step(x, y), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)
    assert "compiled regions" in fast.explain()
    assert "fused, one lane, one graph" in fast.explain()


@pytest.mark.parametrize("fuse", [False, True])
def test_as_a_backend_of_dynamo(fuse: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = models.small_resnet().to(DEVICE)
    plain = models.small_resnet().to(DEVICE)
    plain.load_state_dict(net.state_dict())
    fast = torch.compile(net, backend=mh.compile_backend, options={"fuse": fuse})
    x, y = torch.rand(16, 1, 28, 28, device=DEVICE), torch.arange(16, device=DEVICE) % 10
    for _ in range(3):
        for model, call in ((net, fast), (plain, plain)):
            model.zero_grad()
            nn.functional.cross_entropy(call(x), y).backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-4)
