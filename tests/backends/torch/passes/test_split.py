"""Updates over lists taken apart: parts run as soon as their gradients are there, and bits stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lane_cases import scheduled, traced
from torch import nn

from manyhands.backends.torch import planning
from manyhands.backends.torch.capture.call import call as call_of
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.capture.whole import trace_whole
from manyhands.backends.torch.passes.split import split
from manyhands.backends.torch.run.threads import ThreadRun
from manyhands.schedule.lanes import schedule_main_lane

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="virtual devices hold for one thread: lanes are not used with them"
)


def parted(trace: Trace, least: int = 1) -> Trace:
    """On a CPU, where nothing is cut by itself."""
    return split(trace, ("cpu",), least)


def names(trace: Trace) -> list[str]:
    return [task.name for task in trace.tasks]


def lengths(trace: Trace, name: str) -> list[int]:
    """Of the first lists of the operations of this name."""
    return [len(step.node.args[0]) for step in trace.steps if step.task.name == name]  # type: ignore[arg-type]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())])


def step_of(model: nn.Module, make: Callable[..., Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = make(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class CapturableAdam:
    """AdamW with the operations of ``foreach=True, capturable=True``, which PyTorch offers on GPUs alone."""

    def __init__(self, parameters: Any) -> None:
        self.weights = list(parameters)
        self.steps = [torch.zeros(()) for _ in self.weights]
        self.means, self.squares = ([torch.zeros_like(weight) for weight in self.weights] for _ in range(2))

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        gradients = [weight.grad for weight in self.weights]
        torch._foreach_add_(self.steps, 1)
        torch._foreach_mul_(self.weights, 1 - 0.01 * 0.1)
        torch._foreach_lerp_(self.means, gradients, 0.1)
        torch._foreach_mul_(self.squares, 0.999)
        torch._foreach_addcmul_(self.squares, gradients, gradients, 0.001)
        first, second = (torch._foreach_pow(beta, self.steps) for beta in (0.9, 0.999))
        for value in (first, second):
            torch._foreach_sub_(value, 1)
        torch._foreach_neg_(second)
        torch._foreach_div_(first, 0.01)
        torch._foreach_reciprocal_(first)
        torch._foreach_sqrt_(second)
        roots = torch._foreach_sqrt(self.squares)
        torch._foreach_div_(roots, second)
        torch._foreach_add_(roots, 1e-8)
        torch._foreach_div_(roots, first)
        torch._foreach_addcdiv_(self.weights, self.means, roots)


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
MAKES: dict[str, Any] = {
    "plain": lambda p: SGD(p, lr=0.1, foreach=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "nesterov, decay": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "fused SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "Adam on a GPU": lambda p: CapturableAdam(p),
    "fused Adam": lambda p: ADAM(p, lr=0.01, weight_decay=0.01, fused=True),
    "fused AdamW": lambda p: ADAMW(p, lr=0.01, amsgrad=True, fused=True),
}


@pytest.mark.parametrize("name", MAKES)
def test_steps_with_updates_in_parts_are_equal_to_the_bit(name: str) -> None:
    plain, result = net(), net()
    eager, step = step_of(plain, MAKES[name]), step_of(result, MAKES[name])
    x = torch.randn(5, 8)
    eager(x), step(x)  # the first step makes the optimizer's state
    made = call_of((x,), {})
    whole = trace_whole(step, made)
    trace, tensors = whole.trace, made.tensors
    apart = parted(trace)
    last = [name for name in names(trace) if name.startswith(("_foreach_add", "_fused"))][-1]  # of weights
    assert names(apart).count(last) >= names(trace).count(last) + 2
    run = ThreadRun(apart, planning.plan_of(scheduled(apart, 2)), 2)
    for _ in range(3):
        assert torch.equal(whole.result(run.replay(tensors)), eager(x))
        for parameter, other in zip(result.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter, other)
            assert parameter.grad is not None
            assert other.grad is not None
            assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("name", MAKES)
def test_an_update_begins_before_the_last_gradient_is_made(name: str) -> None:
    step, x = step_of(net(), MAKES[name]), torch.randn(5, 8)
    step(x)
    trace, _ = traced(step, x)
    update = [name for name in names(trace) if name.startswith(("_foreach_add", "_fused"))][-1]  # of weights

    def places(apart: Trace) -> tuple[int, int]:
        """Of the first update of weights, and of the product that gives the last gradient of a weight."""
        order = scheduled(apart, 2, apart.tasks, schedule_main_lane).order
        updates = [order.index(number) for number, task in enumerate(apart.tasks) if task.name == update]
        gradients = [order.index(number) for number, task in enumerate(apart.tasks) if task.name == "mm"]
        return min(updates), max(gradients)

    first, last = places(parted(trace))
    assert first < last
    first, last = places(trace)
    assert first > last


def test_lists_are_cut_into_few_parts_of_about_equal_bytes() -> None:
    sizes = [100, 100, 1, 1, 198, 50, 50, 50, 50, 1]
    weights = [torch.zeros(size) for size in sizes]

    def update(x: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_(weights, [x.expand(size).sin() for size in sizes], alpha=-0.1)
        return x + 1

    trace, _ = traced(update, torch.ones(1))
    assert lengths(parted(trace), "_foreach_add_") == [2, 3, 4, 1]
    assert lengths(parted(trace, 4 * 100), "_foreach_add_") == [2, 3, 5]
    assert lengths(parted(trace, 4 * 201), "_foreach_add_") == [3, 7]
    assert parted(trace, 4 * 400) is trace
    assert split(trace, least=1) is trace  # on a CPU such an operation is a loop


def test_numbers_go_with_their_tensors_and_results_are_found_in_their_part() -> None:
    def scaled(*xs: torch.Tensor) -> list[torch.Tensor]:
        made = torch._foreach_mul([x.sin() for x in xs], [1.0, 2.0, 3.0, 4.0])
        torch._foreach_add_(made, [10.0, 20.0, 30.0, 40.0])
        return [made[2], made[0], made[3]]

    xs = [torch.randn(3) for _ in range(4)]
    trace, tensors = traced(scaled, *xs)
    apart = parted(trace)
    assert lengths(apart, "_foreach_mul") == lengths(apart, "_foreach_add_") == [1, 1, 1, 1]
    run = ThreadRun(apart, planning.plan_of(scheduled(apart, 2)), 2)
    for value, other in zip(run.replay(tensors), scaled(*xs), strict=True):
        assert torch.equal(value, other)


def test_a_tensor_that_is_in_several_parts_is_updated_in_their_order() -> None:
    base = torch.randn(12)

    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        whole = base * 1
        left, right = whole[:8], whole[4:]  # they overlap
        torch._foreach_mul_([left, right, left], [x.sin().sum(), y.cos().sum(), x.tan().sum()])
        torch._foreach_addcmul_([left[:4], right[4:]], [x.exp()[:4], y.exp()[:4]], [right[:4], left[:4]])
        return whole

    x, y = torch.randn(8), torch.randn(8)
    trace, tensors = traced(twice, x, y)
    apart = parted(trace)
    assert lengths(apart, "_foreach_mul_") == [1, 1, 1]
    assert lengths(apart, "_foreach_addcmul_") == [1, 1]
    run = ThreadRun(apart, planning.plan_of(scheduled(apart, 3)), 3)
    for _ in range(5):
        assert torch.equal(run.replay(tensors)[0], twice(x, y))


def test_what_could_not_begin_at_different_times_stays_whole() -> None:
    weights, momenta = ([torch.zeros(4) for _ in range(4)] for _ in range(2))

    def update(*gradients: torch.Tensor) -> torch.Tensor:
        torch._foreach_mul_(momenta, 0.9)  # all there before
        torch._foreach_add_(momenta, gradients)  # so are arguments
        made = [gradient.sin() for gradient in gradients]
        norm = torch.stack([value.square().sum() for value in made]).sum()
        torch._foreach_div_(made, norm)  # for which all gradients must be there
        torch._foreach_add_(weights, made, alpha=-0.1)
        flat = torch.cat(gradients)
        torch._foreach_sub_(weights, [flat[4 * number : 4 * number + 4] for number in range(4)])
        return norm

    trace, _ = traced(update, *[torch.randn(4) for _ in range(4)])
    assert parted(trace) is trace


def test_what_is_no_list_of_equals_stays_whole() -> None:
    weights = [torch.zeros(4) for _ in range(4)]

    def update(*xs: torch.Tensor) -> Any:
        made = [x.sin() for x in xs]
        # One of them in another form: all of them are done in a loop, and parts would not be.
        torch._foreach_add_(weights, [*made[:3], made[3][:1]])
        return torch._foreach_norm(made)  # summed up in pieces as the largest of them has

    trace, _ = traced(update, *[torch.randn(4) for _ in range(4)])
    assert parted(trace) is trace


def test_by_itself_only_large_lists_on_gpus_are_cut() -> None:
    step, x = step_of(net(), MAKES["plain"]), torch.randn(5, 8)
    step(x)
    trace, _ = traced(step, x)
    assert lengths(trace, "_foreach_add_") == [12]
    assert split(trace, ("cpu",)) is trace
