"""Compiled regions of a trace: the same results, and no operation waits for more than it did before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from region_cases import needs_compiler, regions, results, step_of, traced, uncompiled
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from manyhands.backends.torch import planning as backend
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.passes import regions as torch_fuse
from manyhands.errors import CannotFuse
from manyhands.schedule.task import needs
from manyhands.training.torch.book import models

pytestmark = pytest.mark.skipif(
    torch._C._len_torch_dispatch_stack() > 0, reason="PyTorch compiles nothing beside a dispatch mode"
)


def large_before(trace: Trace) -> list[tuple[str, frozenset[tuple[str, int]]]]:
    """For each operation that is in no region: which others that are in none come before it, by their names."""
    before: list[frozenset[tuple[str, int]]] = []
    counts: dict[str, int] = {}
    names: list[tuple[str, int]] = []
    for step, earlier in zip(trace.steps, needs(trace.tasks), strict=True):
        name = step.task.name
        names.append((name, counts.setdefault(name, 0)))
        counts[name] += 1
        before.append(frozenset().union(*(before[value] | {names[value]} for value in earlier)))
    return list(zip((name for name, _ in names), before, strict=True))


class Branchy(nn.Module):
    """Branches of a convolution, a normalisation and an activation each, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU()) for _ in range(3)
        )
        self.out = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        parts = [branch(x) for branch in self.branches]
        return self.out((parts[0] + parts[1] * parts[2].sigmoid()).mean((2, 3)))


NETS = {"lenet": models.lenet, "small resnet": models.small_resnet, "branchy": Branchy}
BATCH = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(4)


@pytest.mark.parametrize(("name", "cast"), [("lenet", False), ("lenet", True), ("branchy", False), ("branchy", True)])
def test_a_training_step_is_the_same(name: str, cast: bool) -> None:
    torch.manual_seed(0)
    function = step_of(NETS[name](), cast)
    trace = traced(function, *BATCH)
    fused = torch_fuse.fuse(trace, uncompiled)
    assert fused.compiled_regions == len(regions(fused)) > 0
    assert len(regions(fused)) >= 2
    assert len(fused.steps) < len(trace.steps)
    assert backend.equal(results(fused, *BATCH), results(trace, *BATCH)) == (True, 0.0)


@pytest.mark.parametrize("name", NETS)
def test_nothing_waits_for_more_than_before(name: str) -> None:
    """Of every operation outside of regions: the large ones before it are those of the program."""
    torch.manual_seed(0)
    trace = traced(step_of(NETS[name]()), *BATCH)
    fused = torch_fuse.fuse(trace, uncompiled)
    large = {"convolution", "convolution_backward", "mm", "addmm", "max_pool2d_with_indices"}

    def heavy(of: Trace) -> dict[str, list[int]]:
        """How many large operations come before each large operation; the order of equal ones is none of ours."""
        result: dict[str, list[int]] = {}
        for name, before in large_before(of):
            if name in large:
                result.setdefault(name, []).append(len({value for value in before if value[0] in large}))
        return {name: sorted(counts) for name, counts in result.items()}

    assert heavy(fused) == heavy(trace)


def test_branches_are_not_tied_together() -> None:
    def wanted_twice(a: torch.Tensor, b: torch.Tensor) -> Any:
        p, q = (a @ a).sin().cos(), (b @ b).cos().sin()
        return p @ a, q @ b, (p + q).exp()

    def wanted_once(a: torch.Tensor, b: torch.Tensor) -> Any:
        return ((a @ a).sin() + (b @ b).cos()).exp()

    x = torch.rand(4, 4), torch.rand(4, 4)
    names = [name.partition(" [")[0] for name in regions(torch_fuse.fuse(traced(wanted_twice, *x), uncompiled))]
    assert sorted(names) == ["fused add exp", "fused cos sin", "fused sin cos"]
    names = [name.partition(" [")[0] for name in regions(torch_fuse.fuse(traced(wanted_once, *x), uncompiled))]
    assert names == ["fused sin cos add exp"]


def test_what_two_regions_want_is_in_neither() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        shared = a.sin()
        return ((shared + a @ a).cos() * 2) @ a, ((shared * (b @ b)).exp() + 1) @ b

    trace = traced(function, torch.rand(4, 4), torch.rand(4, 4))
    fused = torch_fuse.fuse(trace, uncompiled)
    assert "sin" in [step.task.name for step in fused.steps]
    before = [
        len([value for value in earlier if value[0] == "mm"]) for name, earlier in large_before(fused) if name == "mm"
    ]
    assert sorted(before) == [0, 0, 1, 1]


def test_equal_regions_are_compiled_once() -> None:
    compiled = []

    def counting(module: GraphModule, metas: Any) -> Callable[..., Any]:
        compiled.append(module.code)
        return module

    def twice(a: torch.Tensor, b: torch.Tensor) -> Any:
        return (a @ a).sin().cos(), (b @ b).sin().cos()

    fused = torch_fuse.fuse(traced(twice, torch.rand(4, 4), torch.rand(4, 4)), counting)
    assert len(regions(fused)) == 2
    assert len(compiled) == 1


def test_views_and_writes() -> None:
    """A view of an argument that is a result's base, a value that is written to later, an argument that is."""
    state = torch.zeros(4)

    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        view = a.t()
        x = (view * 2 + 1).relu()
        y = (x.sin() + x.cos()).t()
        z = (b * 3).exp()
        z.add_(1)
        state.add_(b.sum())
        after = (state * 2).sin() + z.sum()
        return y, view @ x, z, after, x.t() * 2

    a, b = torch.rand(4, 4), torch.rand(4)
    trace = traced(function, a, b)
    fused = torch_fuse.fuse(trace, uncompiled)
    assert backend.equal(results(fused, a, b), results(trace, a, b)) == (True, 0.0)
    assert torch.equal(state, torch.zeros(4))


def test_an_optimizer_in_the_function() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 26 * 26, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(*BATCH)
    trace = traced(step, *BATCH)
    fused = torch_fuse.fuse(trace, uncompiled)
    assert "batch_norm" in " ".join(regions(fused))
    assert backend.equal(results(fused, *BATCH), results(trace, *BATCH)) == (True, 0.0)


def test_random_numbers_are_left_alone() -> None:
    def function(a: torch.Tensor) -> Any:
        return nn.functional.dropout(a.sin().cos(), 0.5, training=True).sin().cos()

    a = torch.rand(8, 8)
    trace = traced(function, a)
    fused = torch_fuse.fuse(trace, uncompiled)
    assert any(step.task.token is not None for step in fused.steps)
    assert backend.equal(results(fused, a), results(trace, a)) == (True, 0.0)


def test_where_there_is_nothing_to_fuse() -> None:
    with pytest.raises(CannotFuse, match="no two small operations"):
        torch_fuse.fuse(traced(lambda a: a @ a, torch.rand(3, 3)))


@needs_compiler
def test_inductor_compiles_the_regions() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 26 * 26, 10))
    function = step_of(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), head))
    trace = traced(function, *BATCH)
    fused = torch_fuse.fuse(trace)
    for result, other in zip(results(fused, *BATCH), results(trace, *BATCH), strict=True):
        if not isinstance(other, torch.Tensor) or not other.is_floating_point():
            assert backend.equal([result], [other]) == (True, 0.0)
        elif other.norm() > 1e-5:
            assert (result - other).norm() / other.norm() < 1e-4
        else:  # a bias before a BatchNorm: its gradient is rounding, and nothing else
            assert result.norm() < 1e-4


def test_without_a_compiler_it_says_why() -> None:
    def function(a: torch.Tensor) -> Any:
        return (a.sin() + 1.2345).cos() * 5.4321

    from torch._inductor import config

    with config.patch({"cpp.cxx": ("a-compiler-that-is-not-there",)}), pytest.raises(CannotFuse, match="a-compiler"):
        torch_fuse.fuse(traced(function, torch.rand(17)))


@needs_compiler
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.zeros_like(x) + x,
        lambda x: x * torch.ones_like(x),
        lambda x: x - torch.zeros_like(x),
        lambda x: (x.sin() + torch.zeros_like(x), x.sin() * 1),
    ],
)
def test_a_region_gives_nothing_back_that_is_not_its_own(function: Any) -> None:
    """The compiler's folding would leave of x + 0 the argument itself, and of two results one memory."""
    x = torch.randn(32, 32)
    module = make_fx(function, tracing_mode="fake")(x)
    arguments = torch_fuse.inductor(module, [x])(x)
    results = list(arguments) if isinstance(arguments, (list, tuple)) else [arguments]
    expected = function(x)
    for result, other in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(result, other)  # a compiled sin may differ from eager's in the last bit
    assert len({value.data_ptr() for value in [x, *results]}) == 1 + len(results)
