"""Hooks of parameters, layers and optimizers: the same on one device, in micro-batches and in worker processes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_cases import difference, fit, mlp, vectors

from manyhands import torch as mh
from manyhands.errors import BadSettings, NotSendable
from manyhands.training.options import Step
from manyhands.training.torch.workers import job_bytes

CLOSE = 1e-12
IN_PARTS: list[dict[str, Any]] = [{"ranks": 2}, {"step": Step(accumulate=3)}]


def masked(net: nn.Sequential) -> None:
    """The mask is that of the weight itself, which the hook holds."""
    weight: Any = net[0].weight
    with torch.no_grad():
        weight[0] = 0
    weight.register_hook(lambda gradient: gradient * (weight != 0))


def masked_afterwards(net: nn.Sequential) -> None:
    mask = torch.ones(8, 6, dtype=torch.float64)
    mask[0] = 0

    def mask_gradient(weight: Any) -> None:
        weight.grad.mul_(mask)

    def replace_gradient(weight: Any) -> None:
        weight.grad = weight.grad * mask[:3, :1]  # another tensor

    net[0].weight.register_post_accumulate_grad_hook(mask_gradient)
    net[2].weight.register_post_accumulate_grad_hook(replace_gradient)


def doubled(net: nn.Sequential) -> None:
    net[2].weight.register_hook(functools.partial(torch.mul, other=2.0))
    net[0].register_forward_hook(lambda layer, inputs, output: output + 1)
    net[1].register_full_backward_hook(lambda layer, inputs, outputs: tuple(g if g is None else 3 * g for g in inputs))


@pytest.mark.parametrize("register", [masked, masked_afterwards, doubled])
def test_linear_hooks_act_on_parts_as_on_the_whole(register: Any) -> None:
    def trained(**how: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        net = mlp()
        register(net)
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        return before, fit(net, vectors(), **how)[0]

    before, weights = trained()
    assert difference(weights, fit(mlp(), vectors())[0]) > 1e-3, "the hook does nothing"
    if register is not doubled:
        assert torch.equal(before["0.weight"][0], weights["0.weight"][0])
    for how in IN_PARTS:
        assert difference(weights, trained(**how)[1]) <= CLOSE, how


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


def test_a_model_on_another_device_keeps_its_hooks() -> None:
    """It is copied to the host before it is sent, and what hooks hold is the copy."""
    weights = []
    for ranks in (1, 2):
        with mh.virtual_devices(2, as_cuda=True):
            net = mlp().to("cuda:1")
            masked(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            optimizer.register_step_post_hook(lambda *_, bias=net[2].bias: bias.data.clamp_(-0.1, 0.1))
            weights.append(fit(net, vectors(), ranks, optimizer=optimizer)[0])
    on_host = [{name: tensor.cpu() for name, tensor in each.items()} for each in weights]
    assert float(on_host[0]["2.bias"].abs().max()) <= 0.1
    assert difference(*on_host) <= CLOSE


def halved(weight: torch.Tensor) -> None:
    weight.grad.mul_(0.5)  # type: ignore[union-attr]


class LateHook(nn.Module):
    """A hook that is registered in the first forward pass, when the trainer has its own already."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.registered = mlp(), False

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        if self.training and not self.registered:
            self.registered = True
            self.net[0].weight.register_post_accumulate_grad_hook(halved)
        return self.net(X)  # type: ignore[no-any-return]


def test_a_hook_that_comes_late_acts_before_the_sum() -> None:
    weights = fit(LateHook(), vectors())[0]
    assert difference(weights, fit(LateHook(), vectors(), 2)[0]) <= CLOSE


def clamped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-5, 5)


def noisy(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + torch.randn_like(gradient)


def decayed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + 0.1


@pytest.mark.parametrize("hook", [clamped, noisy, decayed, torch.sign])
@pytest.mark.parametrize("how", IN_PARTS)
def test_a_hook_that_is_not_linear_is_refused_with_parts(hook: Any, how: dict[str, Any]) -> None:
    net = mlp()
    net[2].weight.register_hook(hook)
    state = torch.get_rng_state()
    with pytest.raises(BadSettings, match=r"'2.weight'.*not linear.*gradient_clip_val.*register_step_pre_hook"):
        fit(net, vectors(), **how)
    assert torch.equal(torch.get_rng_state(), state)
    fit(net, vectors())


def test_a_hook_after_each_accumulation_acts_once_or_is_refused() -> None:
    """Half of a sum over devices is the sum of halves; in micro-batches it would be halved again and again."""
    weights = []
    for ranks in (1, 2):
        net = mlp()
        net[2].weight.register_post_accumulate_grad_hook(halved)
        weights.append(fit(net, vectors(), ranks)[0])
    assert difference(*weights) <= CLOSE
    with pytest.raises(BadSettings, match=r"'2.weight'"):
        fit(net, vectors(), step=Step(accumulate=3))


def test_an_optimizer_in_the_backward_pass_is_refused_with_parts() -> None:
    net = mlp()
    optimizer = torch.optim.SGD([net[2].weight], lr=0.1)

    def update(weight: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    net[2].weight.register_post_accumulate_grad_hook(update)
    before = net[2].weight.detach().clone()
    with pytest.raises(BadSettings, match=r"'2.weight'.*leaves no gradient"):
        fit(net, vectors(), 2)
    assert torch.equal(net[2].weight, before)


def test_a_hook_that_looks_is_not_disturbed() -> None:
    """It is tried on a copy: what it has seen is what the job showed it."""
    net, seen = mlp(), []
    net[2].weight.register_hook(lambda gradient: seen.append(float(gradient.norm())))
    fit(net, vectors(32), max_epochs=1, step=Step(accumulate=2))
    assert len(seen) == 4


def test_hooks_with_sharded_parameters_are_refused() -> None:
    net = mlp()
    masked(net)
    with pytest.raises(BadSettings, match=r"shard=True.*'0.weight'"):
        fit(net, vectors(), 2, step=Step(shard=True))


def test_hooks_of_every_optimizer_are_refused() -> None:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(NotSendable, match="every optimizer"):
            fit(mlp(), vectors(), 2)
    finally:
        handle.remove()


def test_a_shared_parameter_stays_one() -> None:
    """With its hook, and with the optimizer that holds it."""
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    net[1].weight = net[0].weight
    net[0].weight.register_hook(lambda gradient: net[1].weight * 0)
    sent, optimizer = job_bytes.loads(job_bytes.dumps((net, torch.optim.SGD(net.parameters(), lr=1.0))))
    assert sent[0].weight is sent[1].weight
    sent[0](torch.ones(1, 2)).sum().backward()
    assert not sent[0].weight.grad.any()
    assert optimizer.param_groups[0]["params"][0] is sent[0].weight
