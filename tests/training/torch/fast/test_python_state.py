"""What a CUDA graph would freeze is found."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_cases import CLASSES, mlp, vectors

from manyhands.training.torch.fast import python_state
from manyhands.training.torch.step.running_sums import RunningSums
from manyhands.training.torch.step.update import StepUndo


class Changing(nn.Module):
    """Does something in Python in each forward pass."""

    def __init__(self, kind: str = "nothing") -> None:
        super().__init__()
        self.net, self.kind = mlp(norm=True), kind
        self.calls, self.cache, self.kept = 0, None, []
        self.last = torch.zeros(())
        self.register_buffer("count", torch.zeros(()))
        self.hidden, self.options, self.rng = (torch.zeros(()), 1), {"calls": [0]}, np.random.default_rng(0)

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        if self.kind == "counter":
            self.calls += 1
        elif self.kind == "cache" and self.cache is None:
            self.cache = torch.ones(CLASSES)
        elif self.kind == "list":
            self.kept.append(X.shape)
        elif self.kind == "memory":
            self.last = X.detach().mean()
        elif self.kind == "buffer":
            self.count = self.count + 1
        elif self.kind == "buffer in place":
            self.count += 1
        elif self.kind == "hidden state":
            self.hidden = (X.detach().mean(), 1)
        elif self.kind == "counter in a dict":
            self.options["calls"][0] += 1
        elif self.kind == "generator of its own":
            self.rng.random()
        elif self.kind == "coin":
            random.random()
        elif self.kind == "numpy coin":
            np.random.rand()
        elif self.kind == "layer that is dropped" and torch.rand([]) < 0.5:
            return X[:, :CLASSES] * self.net[0].weight.sum()
        scores: torch.Tensor = self.net(X)
        return scores


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nothing", None), ("cache", None), ("counter", "Changing.calls"), ("list", "Changing.kept"),
        ("memory", "Changing.last"), ("coin", "Python's random"), ("numpy coin", "numpy.random"),
        ("layer that is dropped", "the CPU's"), ("buffer", "Changing.count"), ("buffer in place", None),
        ("hidden state", "Changing.hidden"), ("counter in a dict", "Changing.options"),
        ("generator of its own", "random numbers from Changing.rng"),
    ],
)  # fmt: skip
def test_what_python_does_is_seen(kind: str, said: str | None) -> None:
    net = Changing(kind)
    watch = python_state.Watch([net, None], RunningSums(torch.device("cpu")))
    found = []
    for _ in range(3):
        random.random()  # between the steps others may draw
        torch.rand(1)
        watch.before()
        net(vectors()[0])
        found.append(watch.after())
    assert found == [None] * 3 if said is None else any(one is not None and said in one for one in found[:2])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_hooks() -> None:
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
    handles = [net[2].register_forward_hook(lambda *_: None)]
    assert "the layer '2' has a hook" in str(python_state.hooks(net, optimizer))
    handles.append(net[2].bias.register_hook(lambda gradient: gradient.clamp(-1, 1)))
    handles.pop(0).remove()
    assert "the parameter '2.bias' has a hook" in str(python_state.hooks(net, optimizer))
    handles.append(net[2].bias.register_post_accumulate_grad_hook(lambda _: None))
    handles.pop(0).remove()
    assert "the parameter '2.bias' has a hook" in str(python_state.hooks(net, optimizer))
    handles.append(optimizer.register_step_post_hook(lambda *_: None))
    handles.pop(0).remove()
    assert "the optimizer has a hook" in str(python_state.hooks(net, optimizer))


def test_a_hook_of_all_optimizers() -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert "the optimizer has a hook" in (python_state.hooks(net, optimizer) or "")
    finally:
        handle.remove()
    assert python_state.hooks(net, optimizer) is None


def test_a_rate_that_is_changed_in_a_step_is_seen() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    watch = python_state.Watch([net], RunningSums(torch.device("cpu")), optimizer)
    found = []
    for _ in range(2):
        watch.before()
        optimizer.step()
        schedule.step()
        found.append(watch.after())
    assert found[0] is None
    assert "'lr' of the optimizer's group 0 changes from step to step" in str(found[1])


def test_steps_that_may_be_taken_back_are_counted_on_the_gpu() -> None:
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    StepUndo(net, optimizer, torch.device("cpu"), []).prepare()
    assert optimizer.param_groups[0]["capturable"] is False
    StepUndo(net, optimizer, torch.device("cuda", 1), []).prepare()
    assert optimizer.param_groups[0]["capturable"] is True
