"""What a CUDA graph would freeze is found, and a graph that cannot be made costs nothing but time.

There is no GPU here: streams are stood in for by nothing at all, and what is run is the way up to the graph.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from captured_step_cases import CPU, GENERATOR, MODES, Failing, assert_as_plain_steps, graph_step, without_gpu
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from training_cases import CLASSES, difference, mlp, vectors

from manyhands.training.data.order import Window
from manyhands.training.settings import Settings
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast import python_state
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.job import Job
from manyhands.training.torch.learner import Rank
from manyhands.training.torch.objective import Supervised
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.step.running_sums import RunningSums
from manyhands.training.torch.step.undo import StepUndo


class Changing(nn.Module):
    """Does something in Python in each forward pass."""

    def __init__(self, kind: str = "nothing") -> None:
        super().__init__()
        self.net, self.kind = mlp(norm=True), kind
        self.calls, self.cache, self.kept = 0, None, []
        self.last = torch.zeros(())

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        if self.kind == "counter":
            self.calls += 1
        elif self.kind == "cache" and self.cache is None:
            self.cache = torch.ones(CLASSES)
        elif self.kind == "list":
            self.kept.append(X.shape)
        elif self.kind == "memory":
            self.last = X.detach().mean()
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
        ("layer that is dropped", "the CPU's"),
    ],
)  # fmt: skip
def test_what_python_does_is_seen(kind: str, said: str | None) -> None:
    net = Changing(kind)
    watch = python_state.Watch([net, None])
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
    watch = python_state.Watch([net])
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
    watch = python_state.Watch([net], optimizer)
    found = []
    for _ in range(2):
        watch.before()
        optimizer.step()
        schedule.step()
        found.append(watch.after())
    assert found[0] is None
    assert "'lr' of the optimizer's group 0 changes from step to step" in str(found[1])


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize(("at", "times"), [(1, 2), (2, 2), (3, 1), (4, 1)])
def test_a_warm_up_that_fails_is_not_counted(at: int, times: int) -> None:
    net = mlp(norm=True)
    graph, eager = graph_step(net, 4, Failing(at, times))
    assert "not on this device" in str(graph.ended)
    assert_as_plain_steps(net, eager, 4)


@pytest.mark.usefixtures("_no_gpu")
def test_an_update_is_not_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("after the update")

    monkeypatch.setattr(RunningSums, "add", broken)
    with pytest.raises(ValueError, match="after the update"):
        graph_step(mlp(), 1)


@pytest.mark.usefixtures("_no_gpu")
def test_python_that_changes_ends_the_graphs() -> None:
    graph, eager = graph_step(Changing("counter"), 5)
    assert "Changing.calls" in str(graph.ended)
    assert eager.metrics.read().count == 80
    graph, _ = graph_step(Changing("cache"), 3)
    assert graph.ended is None


@pytest.mark.usefixtures("_no_gpu")
def test_a_capture_that_fails_ends_the_graphs() -> None:
    graph, _ = graph_step(mlp(), 5)
    assert "not while capturing" in str(graph.ended)
    assert GENERATOR.usable


class Reading:
    """A loss that reads a value on the host."""

    def __call__(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if MODES[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return nn.functional.cross_entropy(scores, y)


@pytest.mark.usefixtures("_no_gpu")
def test_what_waits_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails leaves traces in PyTorch: it is not even begun."""
    net = mlp(norm=True)
    monkeypatch.setattr(GraphStep, "_capture", lambda *_: pytest.fail("there is a capture"))
    graph, eager = graph_step(net, 7, Reading())
    assert "synchronizing" in str(graph.ended)
    assert MODES == [0, "error", 0]
    assert_as_plain_steps(net, eager, 7)


@pytest.mark.usefixtures("_no_gpu")
def test_an_update_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the update nothing can be taken back: there a wait fails in the capture at the earliest."""
    modes: list[int | str] = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: [modes.append(MODES[-1]), step(self)])
    graph_step(mlp(), 3)
    assert modes == [0, 0, 0]


@pytest.mark.usefixtures("_no_gpu")
def test_where_the_compiler_fails_the_graph_is_made_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> Any:
        def call(*_: object) -> None:
            raise RuntimeError("there is no C compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    net, expected = mlp(norm=True), mlp(norm=True)
    graph, _ = graph_step(net, 3, compiled=True)
    graph_step(expected, 3)
    assert "no C compiler" in graph.reasons["compiler"]
    assert graph.ended is None
    assert "kernels not compiled" in graph.explain()
    assert difference(net.state_dict(), expected.state_dict()) < 1e-15


class Ended(GraphStep):
    """A graph that has come to its end."""

    compiled = False

    def __init__(self) -> None:
        self.ended = "for a test"


def test_a_graph_that_ends_leaves_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    job = Job(
        mlp(),
        Supervised(nn.functional.cross_entropy),
        Arrays(vectors()),
        None,
        Settings(max_epochs=1),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.1, capturable=False),
    )
    rank = Rank(job, World(0, 1, CPU))
    rank.steps.captured = Ended()
    rank.optimizer.param_groups[0]["capturable"] = True  # as a capture wants it
    rank.step(Window(0, 0, 8, 0), None, None)
    assert rank.steps.captured is None
    assert rank.notes == ["plain steps: for a test"]
    assert waited == [CPU]
    assert rank.optimizer.param_groups[0]["capturable"] is False
    assert rank.read()[0].count == 8


def test_steps_that_may_be_taken_back_are_counted_on_the_gpu() -> None:
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    StepUndo(net, optimizer, CPU, []).prepare()
    assert optimizer.param_groups[0]["capturable"] is False
    StepUndo(net, optimizer, torch.device("cuda", 1), []).prepare()
    assert optimizer.param_groups[0]["capturable"] is True
