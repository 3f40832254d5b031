"""What a CUDA graph would freeze is found; what a model does in Python: test_not_captured.py."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_cases import mlp, vectors

from manyhands.training.torch.fast import python_state
from manyhands.training.torch.fast.python_state import unread
from manyhands.training.torch.step.running_sums import RunningSums
from manyhands.training.torch.step.update import StepUndo


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
        random.random()  # between the steps others may draw
        torch.rand(1)
        watch.before()
        net(vectors()[0]).sum().backward()
        assert watch.after() is None


def test_a_rate_that_python_changes_is_seen() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch = python_state.Watch([net, None], RunningSums(torch.device("cpu")), optimizer)
    found = []
    for _ in range(2):
        watch.before()
        optimizer.param_groups[0].update(lr=vectors()[0].mean())
        found.append(watch.after())
    assert any("'lr' of the optimizer's group 0" in str(one) for one in found)


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


# Values that notice being read, and can be used like the value itself


@pytest.mark.parametrize(
    "read",
    [
        lambda n: n + 1, lambda n: 1 + n, lambda n: n % 2, lambda n: 3 - n, lambda n: n == 2, lambda n: n < 5,
        lambda n: bool(n), lambda n: f"{n:03d}", lambda n: str(n), lambda n: [5, 6, 7, 8][n], lambda n: range(n),
        lambda n: torch.zeros(n), lambda n: torch.arange(8)[n], lambda n: torch.ones(4)[:n], lambda n: {2: 1}.get(n),
        lambda n: int(n), lambda n: float(n), lambda n: n.bit_length(), lambda n: torch.ones(2) * n,
    ],
)  # fmt: skip
def test_a_number_that_is_read(read: Any) -> None:
    lines: list[str] = []
    result = read(unread(2, lines.append))
    expected = read(2)
    assert torch.equal(result, expected) if isinstance(expected, torch.Tensor) else result == expected
    assert lines[0].startswith("test_python_state.py:")


def test_a_number_and_a_text_that_are_passed_on() -> None:
    lines: list[str] = []
    number, name = unread(2, lines.append), unread("images/7.png", lines.append)
    kept = {"number": number, "list": [number]}
    assert isinstance(kept["number"], int)
    assert isinstance(name, str)
    assert not lines
    assert name.endswith(".png")
    assert "7" in name
    assert len(lines) == 2
