"""Compiling graphs with Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import needs_compiler
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from manyhands.backends.torch.compat import FakeTensorMode, inductor_compile, prepare_inductor


def write_twice(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x.sin() * w
    w.copy_(y.sum(0))
    w.copy_(y.mean(0))
    return (y,)


def traced(function: Callable[..., Any]) -> tuple[GraphModule, list[torch.Tensor]]:
    """A graph of two arguments, and fake tensors like them."""
    module = make_fx(function, tracing_mode="fake")(*arguments())
    with FakeTensorMode():
        return module, [torch.empty_strided(x.shape, x.stride()) for x in arguments()]


def arguments() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(4, 8, generator=generator), torch.rand(8, generator=generator)]


@needs_compiler
def test_results_and_writes_are_those_of_the_graph() -> None:
    with torch.no_grad():
        compiled = inductor_compile(*traced(write_twice), {"joint_graph_constant_folding": False})
        mine, plain = arguments(), arguments()
        results, expected = compiled(*mine), write_twice(*plain)
    torch.testing.assert_close(tuple(results), expected)
    torch.testing.assert_close(mine, plain)


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
