"""What a CUDA graph would freeze is found."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_cases import mlp, vectors

from manyhands.training.torch.fast import python_state
from manyhands.training.torch.step.running_sums import RunningSums
from manyhands.training.torch.step.update import StepUndo


class Changing(nn.Module):
    """Does something in Python in each forward pass."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.net, self.act, self.calls, self.cache, self.kept = mlp(norm=True), act, 0, None, []
        self.last, self.hidden, self.options = torch.zeros(()), (torch.zeros(()), 1), {"calls": [0]}
        self.register_buffer("count", torch.zeros(()))
        self.rng, self.optimizer = np.random.default_rng(0), torch.optim.SGD(self.net.parameters(), lr=0.1)

    def forward(self, X: torch.Tensor) -> Any:
        self.act(self, X)
        return self.net(X)


CHANGES: dict[str, tuple[Any, str | None]] = {
    "nothing": (lambda *_: None, None),
    "a cache": (lambda net, _: setattr(net, "cache", net.cache or 3), None),
    "a counter": (lambda net, _: setattr(net, "calls", net.calls + 1), "Changing.calls"),
    "a counter in a dict": (lambda net, _: net.options.update(calls=[net.options["calls"][0] + 1]), "Changing.options"),
    "a list": (lambda net, X: net.kept.append(X.shape), "Changing.kept"),
    "a tensor": (lambda net, X: setattr(net, "last", X.mean()), "Changing.last"),
    "a hidden state": (lambda net, X: setattr(net, "hidden", (X.mean(), 1)), "Changing.hidden"),
    "a buffer": (lambda net, _: setattr(net, "count", net.count + 1), "Changing.count"),
    "a buffer in place": (lambda net, _: net.count.add_(1), None),
    "Python's numbers": (lambda *_: random.random(), "Python's random"),
    "NumPy's numbers": (lambda *_: np.random.rand(), "numpy.random"),
    "PyTorch's numbers": (lambda *_: torch.rand([]), "the CPU's"),
    "numbers of its own": (lambda net, _: net.rng.random(), "random numbers from Changing.rng"),
    "a rate": (lambda net, X: net.optimizer.param_groups[0].update(lr=X.mean()), "'lr' of the optimizer's group 0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_python_does_is_seen(change: str) -> None:
    act, said = CHANGES[change]
    net = Changing(act)
    watch = python_state.Watch([net, None], RunningSums(torch.device("cpu")), net.optimizer)
    found = []
    for _ in range(3):
        random.random()  # between the steps others may draw
        torch.rand(1)
        watch.before()
        net(vectors()[0])
        found.append(watch.after())
    assert found == [None] * 3 if said is None else any(one is not None and said in one for one in found[:2])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_hooks_of_pytorch_are_fine() -> None:
    net = mlp()
    nn.utils.spectral_norm(net[0])
    nn.utils.weight_norm(net[2])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert python_state.hooks(net, optimizer) is None
    watch = python_state.Watch([net], RunningSums(torch.device("cpu")))
    for _ in range(2):
        watch.before()
        net(vectors()[0]).sum().backward()
        assert watch.after() is None


HOOKS: dict[str, tuple[Any, str]] = {
    "a layer": (lambda net, _: net[2].register_forward_hook(lambda *_: None), "the layer '2'"),
    "a gradient": (lambda net, _: net[2].bias.register_hook(torch.abs), "the parameter '2.bias'"),
    "a whole gradient": (lambda net, _: net[0].bias.register_post_accumulate_grad_hook(id), "the parameter '0.bias'"),
    "an optimizer": (lambda _, optimizer: optimizer.register_step_post_hook(lambda *_: None), "the optimizer"),
    "all optimizers": (lambda *_: register_optimizer_step_pre_hook(lambda *_: None), "the optimizer"),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_named(hook: str) -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    register, what = HOOKS[hook]
    handle = register(net, optimizer)
    found = python_state.hooks(net, optimizer)
    handle.remove()
    assert found == f"{what} has a hook, which would not run in a graph"
    assert python_state.hooks(net, optimizer) is None


def test_steps_that_may_be_taken_back_are_counted_on_the_gpu() -> None:
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    StepUndo(net, optimizer, torch.device("cpu"), []).prepare()
    assert optimizer.param_groups[0]["capturable"] is False
    StepUndo(net, optimizer, torch.device("cuda", 1), []).prepare()
    assert optimizer.param_groups[0]["capturable"] is True
