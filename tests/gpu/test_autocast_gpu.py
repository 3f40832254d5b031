"""Mixed precision on a real GPU, where one weight is used several times: autocast casts it once, and so does a plan."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from parallel_gpu_cases import GPU, Forced, assert_same, each_run  # noqa: E402
from torch import nn  # noqa: E402

from manyhands.parallel.function import Parallel  # noqa: E402


def step_of(net: Any) -> Any:
    def step(x: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            branches = [x, x.flip(0)]
            for _ in range(3):
                branches = [net(one).relu() for one in branches]
            loss = torch.stack(branches).float().square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]

    return step


@each_run
def test_gradients_of_a_shared_weight(lanes: int, kind: str) -> None:
    torch.manual_seed(0)
    net = nn.Linear(64, 64).to(GPU)
    step = step_of(net)
    fast = Forced(step, lanes, kind)
    for _ in range(3):
        x = torch.randn(32, 64, device=GPU)
        assert_same(fast(x), step(x))
        with torch.no_grad():
            net.weight.mul_(1.5)


def test_a_plan_is_used() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(64, 64).to(GPU), torch.randn(32, 64, device=GPU)
    step = step_of(net)
    fast = Parallel(step, pure=True)
    assert_same(fast(x), step(x))
    assert "one graph" in fast.explain().splitlines()[0]
    assert "results differ" not in fast.explain()
