"""Compiled steps that change weights in place: an update that is wrong is seen, however small it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_float64 import BATCH, traced
from torch import nn

from manyhands.backends.torch import planning as backend
from manyhands.backends.torch.capture.facts import written_values
from manyhands.backends.torch.passes import regions
from manyhands.parallel.choose.equality import Judge

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)


@pytest.mark.parametrize("wrong", ["nothing", "it is not made", "it is made twice", "it is transposed"])
def test_an_update_is_compared_by_what_it_changes(wrong: str) -> None:
    """One step changes a thousandth of a weight: beside all of the weight that would be lost among has_jumps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

    def step(x: Any, y: Any) -> Any:
        loss = nn.functional.cross_entropy(model(x.flatten(1)), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.01)
        return loss.detach()

    found, call = traced(step, *BATCH)
    fused = regions.fuse(found, lambda module, metas: module)
    plain = backend.expected(fused, call, lambda _, arguments, keywords: step(*arguments))
    written = written_values(fused, call.tensors)
    before = model[2].weight.detach().clone()
    place = len(plain) - len(written) + [one is model[2].weight for one in written].index(True)
    change = plain[place] - before
    ours = [one * (1 + 1e-7) for one in plain]
    if wrong == "it is not made":
        ours[place] = before
    elif wrong == "it is made twice":
        ours[place] = plain[place] + change
    elif wrong == "it is transposed":
        ours[place] = before + change.t()
    refused, exactness = Judge(backend, fused, call, plain, []).refused(ours)
    assert (refused is None) == (wrong == "nothing")
    assert "as exact as" in exactness.words if refused is None else "times as far from exact results" in refused
