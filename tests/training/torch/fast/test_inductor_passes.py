"""The passes of a compiled step: convolutions in their chosen ways, in both graphs, alone and with side lanes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes_cases import NoLanes
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

from manyhands.backends.torch.convolutions import choice, products
from manyhands.backends.torch.convolutions.choice import Chosen
from manyhands.backends.torch.convolutions.operations import ChosenConvolutions
from manyhands.backends.torch.convolutions.problems import Problem
from manyhands.training.torch.fast.inductor_passes import StepPasses, UseChosenConvolutions
from manyhands.training.torch.fast.lanes.compiled import CompiledLanes
from manyhands.training.torch.fast.lanes.inductor_pass import MoveToSideLanes

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="Inductor needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path))
    torch._dynamo.reset()
    choice.forget()
    yield
    choice.forget()
    torch._dynamo.reset()


class Net(nn.Module):
    """Convolutions with and without bias, strided, by groups and transposed; the last has no problem to choose for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 1, stride=2, bias=False)
        self.groups = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(16, 4, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.up(self.groups(self.down(x)).relu()).mean((2, 3))


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().sum()


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def two_nets() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    return net, other, torch.randn(4, 1, 12, 12)


def compile_with(passes: StepPasses, targets: Counter[str]) -> Any:
    """A backend that compiles nothing: it runs both graphs as the passes leave them, and counts their operations."""

    def run(module: GraphModule, _: Any) -> Any:
        passes(module.graph)
        module.recompile()
        targets.update(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=run, bw_compiler=run)


def choose_products(problems: Counter[Problem]) -> int:
    """As if products had won wherever there are some; how many these are."""
    for problem in problems:
        trial = choice._Trial(problem)
        for way in products.candidates(problem, trial.result):
            choice._table[problem] = Chosen(way, trial.result, 1.0, 2.0)
    return sum(problem in choice._table for problem in problems)


@pytest.mark.parametrize("lanes", [False, True])
def test_a_compiled_step_computes_convolutions_in_their_ways(lanes: bool) -> None:
    plain, other, x = two_nets()
    loss_of(plain, x).backward()
    targets = Counter[str]()
    passes = StepPasses(UseChosenConvolutions(), *[MoveToSideLanes()] * lanes)
    compiled = torch.compile(loss_of, backend=compile_with(passes, targets), dynamic=False)
    convolutions = ChosenConvolutions(steps=10)

    def step() -> list[torch.Tensor]:
        other.zero_grad()
        with convolutions.in_compiled_code():
            loss = compiled(other, x)
        side = CompiledLanes(NoLanes(), 2)
        with convolutions.in_compiled_code(), side:
            loss.backward()
        assert bool(side.moved) == lanes
        return [gradient.clone() for gradient in gradients(other)]

    convolutions.recording = True
    torch.testing.assert_close(step(), gradients(plain))
    assert targets["manyhands.convolution.default"] == 3
    assert targets["aten.convolution.default"] == 1, "PyTorch's way is the only one for a transposed convolution"
    assert targets["aten.add.Tensor"] >= 2, "biases are added outside"
    assert len(convolutions.problems) == 8  # three layers forward, three weights, two inputs
    assert not any(problem.has_bias for problem in convolutions.problems)
    convolutions.recording = False
    plainly = step()
    assert choose_products(convolutions.problems) >= 3
    by_products = step()
    torch.testing.assert_close(by_products, gradients(plain), rtol=1e-4, atol=1e-4)
    assert not all(map(torch.equal, plainly, by_products)), "another way has other roundings"
    assert len(convolutions.problems) == 8, "recorded once"


def test_a_graph_without_convolutions_stays_as_it_is() -> None:
    targets = Counter[str]()
    compiled = torch.compile(
        lambda x: x.sin().sum(), backend=compile_with(StepPasses(UseChosenConvolutions()), targets), dynamic=False
    )
    x = torch.rand(3, requires_grad=True)
    compiled(x).backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]
    assert not any("manyhands" in target for target in targets)


def test_cached_graphs_are_those_of_the_same_passes() -> None:
    alone = StepPasses(UseChosenConvolutions())
    assert alone.uuid() == StepPasses(UseChosenConvolutions()).uuid()
    assert len({alone.uuid(), StepPasses().uuid(), StepPasses(UseChosenConvolutions(), MoveToSideLanes()).uuid()}) == 3


@pytest.mark.long
@needs_compiler
def test_inductor_accepts_what_the_passes_leave() -> None:
    """Strides and all: Inductor checks those of every result."""
    plain, other, x = two_nets()
    plain, other, x = (value.to(memory_format=torch.channels_last) for value in (plain, other, x))  # type: ignore[call-overload]
    loss_of(plain, x).backward()
    options = {"post_grad_custom_post_pass": StepPasses(UseChosenConvolutions(), MoveToSideLanes())}
    compiled = torch.compile(loss_of, dynamic=False, options=options)
    convolutions = ChosenConvolutions(steps=10)
    convolutions.recording = True
    with convolutions.in_compiled_code():
        loss = compiled(other, x)
        with CompiledLanes(NoLanes(), 2) as side:
            loss.backward()
    assert side.moved
    assert convolutions.problems
    torch.testing.assert_close(gradients(other), gradients(plain), rtol=1e-4, atol=1e-4)
