"""Compiling graphs with Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from whole_cases import needs_compiler

from manyhands.backends.torch.compat import FakeTensorMode, inductor_compile, prepare_inductor

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)


def norm(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.nn.functional.gelu(torch.layer_norm(x, (8,), w)), (x.detach() @ w).mean()


def write_at_end(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x.sin() * w
    w.copy_(y.sum(0))
    return (y,)


def write_twice(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x.sin() * w
    w.copy_(y.sum(0))
    w.copy_(y.mean(0))
    return (y,)


def write_before_use(x: torch.Tensor, w: torch.Tensor) -> Any:
    w.copy_(x.sum(0))
    return (x.sin() * w,)


def write_in_place(x: torch.Tensor, w: torch.Tensor) -> Any:
    return ((x + w).relu_(),)


def write_inside(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x + w
    y[0].copy_(w)
    return (y,)


def alone(x: torch.Tensor, w: torch.Tensor) -> Any:
    return (x + w).sin()


def of_constant(x: torch.Tensor, w: torch.Tensor) -> Any:
    return ((x + w) * torch.arange(8.0).to(x),)


def step(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Operations with several results, lists of tensors, the same layer twice, and one that nobody uses."""
    for _ in range(2):
        x, _, _ = torch.native_layer_norm(x, (8,), w, None, 1e-5)
        x = torch.cat([*x.split(4, dim=1), x.new_full((4, 8), 2.0)], dim=1)[:, :8]
        x = torch.addmm(x, x.t().contiguous().t(), torch.outer(w, w))
    x.softmax(0)
    return torch.var_mean(x, 0)[0], torch.nn.functional.gelu(x, approximate="tanh")


FUNCTIONS = [norm, step, write_at_end, of_constant, write_twice, write_before_use, write_in_place, write_inside, alone]


def traced(function: Callable[..., Any]) -> tuple[GraphModule, list[torch.Tensor]]:
    """A graph of two arguments, and fake tensors like them."""
    module = make_fx(function, tracing_mode="fake")(*arguments())
    with FakeTensorMode():
        return module, [torch.empty_strided(x.shape, x.stride()) for x in arguments()]


def arguments() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(4, 8, generator=generator), torch.rand(8, generator=generator)]


@needs_compiler
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_and_writes_are_the_function_s(function: Callable[..., Any]) -> None:
    with torch.no_grad():
        compiled = inductor_compile(*traced(function), {"joint_graph_constant_folding": False})
        mine, plain = arguments(), arguments()
        results, expected = compiled(*mine), function(*plain)
    torch.testing.assert_close(tuple(results) if isinstance(expected, tuple) else results, expected)
    torch.testing.assert_close(mine, plain)


@needs_compiler
def test_a_graph_without_arguments_is_compiled() -> None:
    module = make_fx(lambda: (torch.arange(8.0).sin() * 2,))()
    with torch.no_grad():
        (result,) = inductor_compile(module, [], {})()
    torch.testing.assert_close(result, torch.arange(8.0).sin() * 2)


def test_processes_are_started_for_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import async_compile

    started: list[str] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: started.append("pool"))
    monkeypatch.setattr(async_compile.AsyncCompile, "wakeup", lambda: started.append("woken"))
    prepare_inductor([torch.rand(2), 3, None])
    assert not started
    with FakeTensorMode(allow_non_fake_inputs=True):
        prepare_inductor([torch.rand(2), torch.empty(2, device="cuda")])
    assert started == ["pool", "woken"]
