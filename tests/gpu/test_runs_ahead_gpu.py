"""A graph that is started before its guards are asked: thrown away where they refuse."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manyhands import torch as mh  # noqa: E402

nn = torch.nn
DEVICE = "cuda:0"


class Scaled(nn.Module):
    """A chain of small operations whose result depends on an attribute that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        # So many that a graph wins on a busy GPU, too.
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(40))
        self.factor = 2.0

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x).relu() * self.factor
        return x


@pytest.mark.parametrize("reuse", [False, True])
def test_a_changed_attribute_is_seen_although_the_graph_was_started(reuse: bool) -> None:
    torch.manual_seed(0)
    net = Scaled().to(DEVICE).eval()
    fast = mh.parallel(torch.no_grad()(net), reuse_outputs=reuse)
    x = torch.rand(16, 64, device=DEVICE)
    with torch.no_grad():
        for _ in range(40):  # until arguments are read in place
            torch.testing.assert_close(fast(x), net(x), rtol=0, atol=0)
        # A run that is thrown away must not overwrite results that are the next call's arguments.
        assert (fast.planned.ahead is None) is reuse, fast.explain()
        net.factor = 3.0
        torch.testing.assert_close(fast(x), net(x), rtol=0, atol=0)
        net.factor = 2.0
        torch.testing.assert_close(fast(x), net(x), rtol=0, atol=0)
        first, second = fast(x), fast(x + 1)
        if not reuse:
            torch.testing.assert_close(first, net(x), rtol=0, atol=0)
        torch.testing.assert_close(second, net(x + 1), rtol=0, atol=0)
        former = fast(x)
        expected = former.clone()
        net.factor = 0.5
        torch.testing.assert_close(fast(former), net(expected), rtol=0, atol=0)
