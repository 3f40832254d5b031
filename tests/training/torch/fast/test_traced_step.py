"""The step through the pipeline: traced, rewritten by passes and run on lanes, it leaves behind what plain steps do.

Here the lanes are run one operation after the other in the caller's thread; ``tests/gpu`` runs them as a CUDA graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_norm_cases import WAYS, Net, residual
from hypothesis import given, settings
from random_norm_cases import PROGRAMS, run
from random_norm_cases import Net as RandomNet
from test_biases_that_stay import Tapped
from torch import nn
from torch.nn import functional

from manyhands.backends.torch import planning
from manyhands.backends.torch.passes.training_step import rewrite
from manyhands.errors import CannotTrace
from manyhands.training.torch.book import models
from manyhands.training.torch.fast.traced_step import TracedStep, schedule_of

CPU = torch.device("cpu")
STEPS = 3
X = torch.rand(6, 2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
X = X.to(memory_format=torch.channels_last)
Y = torch.arange(6) % 3


def step_of(net: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(net).backward()
        optimizer.step()

    step()  # makes the optimizer's state
    return step


def compared(net: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> list[str]:
    """Some steps as written and some through the pipeline; gives what the passes did."""
    net = net.to(memory_format=torch.channels_last)
    other = copy.deepcopy(net)
    plain, step = step_of(net, loss), step_of(other, loss)
    trace, done = rewrite(planning.trace(step, planning.call((), {}), guarded=False))
    planned = schedule_of(trace, (CPU,), lanes=True, held=1 << 12)
    replayed = planning.synchronous_run(trace, planning.plan_of(planned))
    together = planning.together(trace)
    for _ in range(STEPS):
        plain()
        together(replayed.replay([]))
    for (name, parameter), value in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(
            value, parameter, rtol=1e-10, atol=1e-11, msg=lambda why, name=name: f"{name}: {why}"
        )
    for parameter, value in zip(net.parameters(), other.parameters(), strict=True):
        assert (parameter.grad is None) == (value.grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(value.grad, parameter.grad, rtol=1e-9, atol=1e-11)
    return done


def cross_entropy(net: nn.Module) -> torch.Tensor:
    return functional.cross_entropy(net(X), Y)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_norms_and_what_follows_them(way: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(1)
    try:
        compared(Net(way).double(), cross_entropy)
    except CannotTrace:
        # They keep a value for later, or read memory past PyTorch: such a step is captured as it is.
        assert way.__name__ in ("held", "made_again", "changes_past_autograd"), way.__name__


def test_what_the_passes_do() -> None:
    done = compared(Net(lambda net, x: net.second(residual(net, x))).double(), cross_entropy)
    assert "redundant biases: 1 left out" in done
    norms = next(line for line in done if line.startswith("fused norms"))
    for words in ("2 backward past the ReLU", "1 forward with ReLU", "1 forward with addition and ReLU"):
        assert words in norms


@pytest.mark.parametrize(
    "kind", ["residual", "view", "norm used twice", "norm of two", "shared bias", "penalty on the bias", "running mean"]
)
def test_biases_that_are_used_elsewhere(kind: str) -> None:
    x = torch.rand(4, 2, 6, 6, dtype=torch.float64)
    compared(Tapped(kind), lambda net: net(x) / 1000)  # a sum over everything, whose steps would be too large


def test_a_linear_layer_before_a_norm() -> None:
    x = torch.rand(6, 5, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    done = compared(net, lambda net: functional.cross_entropy(net(x), Y))
    assert "redundant biases: 1 left out" in done


@pytest.mark.long
def test_a_resnet() -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 1, 16, 16, dtype=torch.float64).to(memory_format=torch.channels_last)
    net = models.resnet18(3, 1).double()
    net(x)
    done = compared(net, lambda net: functional.cross_entropy(net(x), Y[:4]))
    assert "redundant biases: 17 left out" in done
    assert "counters together: 17" in done


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_any_program() -> None:
    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(PROGRAMS)
    def any_program(program: list[tuple[str, int, int]]) -> None:
        torch.manual_seed(0)
        net = RandomNet().double()
        try:
            run(copy.deepcopy(net).to(memory_format=torch.channels_last), program).backward()
        except RuntimeError:
            return  # PyTorch refuses it
        try:
            compared(net, lambda net: run(net, program))
        except CannotTrace:
            return

    any_program()


class Captured:
    def __init__(self, step: Callable[[], None]) -> None:
        self.step, self.calls = step, 0

    def __call__(self) -> None:
        self.calls += 1
        self.step()


def in_this_thread(trace: Any, plan: Any) -> Any:
    return planning.synchronous_run(trace, plan)


def test_a_plan_with_other_bits_is_not_used() -> None:
    """Planning tries both, and nothing of that stays: each call makes one step, whoever makes it."""
    torch.manual_seed(1)
    net = Net(residual).double().to(memory_format=torch.channels_last)
    other = copy.deepcopy(net)
    plain, step = step_of(net, cross_entropy), step_of(other, cross_entropy)
    captured = Captured(step)
    made = TracedStep(step, captured, CPU, lanes=True, held=0, executor=in_this_thread)
    plain()
    made()
    for value, ours in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-10, atol=1e-11)
    if made.why_not() is None:  # the kernels of a CPU may give the same bits
        made.replay()
    else:
        assert captured.calls == 2
        assert "to the bit" in str(made.why_not())


def test_a_plan_with_the_same_bits_is_used() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    other = copy.deepcopy(net)
    x = torch.rand(6, 5, dtype=torch.float64)
    plain, step = (step_of(value, lambda net: functional.cross_entropy(net(x), Y)) for value in (net, other))
    captured = Captured(step)
    made = TracedStep(step, captured, CPU, lanes=True, held=0, executor=in_this_thread)
    plain(), plain()
    made()
    made.replay()
    assert (made.why_not(), captured.calls) == (None, 1)
    assert "lanes" in made.explain()
    for parameter, ours in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, ours)
        assert torch.equal(parameter.grad, ours.grad)  # type: ignore[arg-type]
