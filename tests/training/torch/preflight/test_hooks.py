"""Hooks of parameters, layers and optimizers: the same on one device, in micro-batches and in worker processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_cases import difference, fit, mlp, vectors

from manyhands.errors import BadSettings, NotSendable
from manyhands.training.options import Step
from manyhands.training.torch.workers import job_bytes

CLOSE = 1e-12
IN_PARTS: list[dict[str, Any]] = [{"ranks": 2}, {"step": Step(accumulate=3)}]


def doubled(gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient


def double(weight: torch.Tensor) -> None:
    weight.grad.mul_(2)  # type: ignore[union-attr]


def test_hooks_of_layers_act_on_parts_as_on_the_whole() -> None:
    def trained(**how: Any) -> dict[str, torch.Tensor]:
        net = mlp()
        net[0].register_forward_hook(lambda layer, inputs, output: output + 1)
        net[1].register_full_backward_hook(
            lambda layer, inputs, outputs: tuple(g if g is None else 3 * g for g in inputs)
        )
        return fit(net, vectors(), **how)[0]

    weights = trained()
    assert difference(weights, fit(mlp(), vectors())[0]) > 1e-3, "the hooks do nothing"
    for how in IN_PARTS:
        assert difference(weights, trained(**how)) <= CLOSE, how


def test_hooks_of_an_optimizer_reach_its_workers() -> None:
    def trained(ranks: int) -> dict[str, torch.Tensor]:
        net = mlp()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        first = net[0].weight

        def freeze(optimizer: Any, *_: Any) -> None:
            first.grad.zero_()  # type: ignore[union-attr]

        optimizer.register_step_pre_hook(freeze)
        optimizer.register_step_post_hook(lambda *_: net[2].bias.data.clamp_(-0.1, 0.1))
        return fit(net, vectors(), ranks, optimizer=optimizer)[0]

    weights = trained(1)
    assert torch.equal(weights["0.weight"], mlp()[0].weight.detach())
    assert float(weights["2.bias"].abs().max()) <= 0.1
    assert difference(weights, trained(2)) <= CLOSE


@pytest.mark.parametrize("how", IN_PARTS)
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused_with_parts(register: str, how: dict[str, Any]) -> None:
    net = mlp()
    getattr(net[2].weight, register)(doubled if register == "register_hook" else double)
    with pytest.raises(BadSettings, match=r"'2.weight' has a hook.*gradient_clip_val.*register_step_pre_hook"):
        fit(net, vectors(), **how)
    assert difference(fit(net, vectors())[0], fit(mlp(), vectors())[0]) > 1e-3


def test_hooks_of_every_optimizer_are_refused() -> None:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(NotSendable, match="every optimizer"):
            fit(mlp(), vectors(), 2)
    finally:
        handle.remove()


def test_a_shared_parameter_stays_one() -> None:
    """With the optimizer that holds it."""
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    net[1].weight = net[0].weight
    sent, optimizer = job_bytes.loads(job_bytes.dumps((net, torch.optim.SGD(net.parameters(), lr=1.0))))
    assert sent[0].weight is sent[1].weight is optimizer.param_groups[0]["params"][0]
