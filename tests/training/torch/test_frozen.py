"""What a CUDA graph would freeze is found, and a graph that cannot be made costs nothing but time.

There is no GPU here: streams are stood in for by nothing at all, and what is run is the way up to the graph.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training_cases import CLASSES, difference, mlp, vectors

from manyhands.training.order import Window
from manyhands.training.settings import Settings
from manyhands.training.torch import frozen
from manyhands.training.torch.graph_step import GraphStep
from manyhands.training.torch.job import Job
from manyhands.training.torch.metrics import Metrics
from manyhands.training.torch.objective import Supervised
from manyhands.training.torch.rank import Rank
from manyhands.training.torch.sources import Arrays
from manyhands.training.torch.step import EagerStep, Numbers
from manyhands.training.torch.world import World

CPU = torch.device("cpu")


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
        scores: torch.Tensor = self.net(X)
        return scores


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nothing", None), ("cache", None), ("counter", "Changing.calls"), ("list", "Changing.kept"),
        ("memory", "Changing.last"), ("coin", "random"), ("numpy coin", "numpy.random"),
    ],
)  # fmt: skip
def test_what_python_does_is_seen(kind: str, said: str | None) -> None:
    net = Changing(kind)
    watch = frozen.Watch([net, None])
    found = []
    for _ in range(3):
        random.random()  # between the steps others may draw
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
    assert frozen.hooks(net, optimizer) is None
    watch = frozen.Watch([net])
    for _ in range(2):
        watch.before()
        net(vectors()[0]).sum().backward()
        assert watch.after() is None
    handles = [net[2].register_forward_hook(lambda *_: None)]
    assert "the layer '2' has a hook" in str(frozen.hooks(net, optimizer))
    handles.append(net[2].bias.register_hook(lambda gradient: gradient.clamp(-1, 1)))
    handles.pop(0).remove()
    assert "the parameter '2.bias' has a hook" in str(frozen.hooks(net, optimizer))
    handles.append(net[2].bias.register_post_accumulate_grad_hook(lambda _: None))
    handles.pop(0).remove()
    assert "the parameter '2.bias' has a hook" in str(frozen.hooks(net, optimizer))
    handles.append(optimizer.register_step_post_hook(lambda *_: None))
    handles.pop(0).remove()
    assert "the optimizer has a hook" in str(frozen.hooks(net, optimizer))


def test_a_rate_that_is_changed_in_a_step_is_seen() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    watch = frozen.Watch([net], optimizer)
    found = []
    for _ in range(2):
        watch.before()
        optimizer.step()
        schedule.step()
        found.append(watch.after())
    assert found[0] is None
    assert "'lr' of the optimizer's group 0 changes from step to step" in str(found[1])


class NoStream:
    def __init__(self, _: object = None) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass


class Generator:
    """Of a GPU, whose state a capture that fails has left unusable."""

    usable = False

    def clone_state(self) -> str:
        return "anew"

    def graphsafe_set_state(self, state: str) -> None:
        self.usable = state == "anew"


MODES: list[int | str] = [0]  # what a wait of the host is; the last one counts
GENERATOR = Generator()


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def refused(*_: object, **__: object) -> Any:
        yield
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", refused)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: MODES[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", MODES.append)
    monkeypatch.setattr(torch.cuda, "default_generators", (GENERATOR,))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    MODES[:], GENERATOR.usable = [0], False


class Failing:
    """A loss that fails at one of its calls, after the forward pass."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("not on this device")
        return nn.functional.cross_entropy(scores, y)


def eager_step(net: nn.Module, loss: Any = nn.functional.cross_entropy) -> EagerStep:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    return EagerStep(net, optimizer, Supervised(loss), Metrics(CPU), CPU, Numbers())


def graph_step(
    net: nn.Module, steps: int, loss: Any = nn.functional.cross_entropy, *, compiled: bool = False
) -> tuple[GraphStep, EagerStep]:
    """Makes steps as a rank does: from the graph where there is one, else plainly."""
    eager, data = eager_step(net, loss), Arrays(vectors(80))
    graph = GraphStep(eager, data, 16, compiled=compiled, changing_rate=False)
    graph.begin_epoch(torch.arange(80), 0, 0)
    for step in range(steps):
        if not graph(16):
            eager(data.take(torch.arange(step * 16, step * 16 + 16)), 16, step)
    return graph, eager


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_warm_up_that_fails_is_not_counted(at: int) -> None:
    net, expected = mlp(norm=True), mlp(norm=True)
    graph, eager = graph_step(net, 3, Failing(at))
    plain = eager_step(expected)
    for step in range(3):
        plain(Arrays(vectors(80)).take(torch.arange(step * 16, step * 16 + 16)), 16, step)
    assert "not on this device" in str(graph.ended)
    assert difference(net.state_dict(), expected.state_dict()) < 1e-15
    assert eager.metrics.read() == plain.metrics.read()


@pytest.mark.usefixtures("_no_gpu")
def test_an_update_is_not_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("after the update")

    monkeypatch.setattr(Metrics, "add", broken)
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
    net, expected = mlp(norm=True), mlp(norm=True)
    monkeypatch.setattr(GraphStep, "_captured", lambda *_: pytest.fail("there is a capture"))
    graph, eager = graph_step(net, 5, Reading())
    plain = eager_step(expected)
    for step in range(5):
        plain(Arrays(vectors(80)).take(torch.arange(step * 16, step * 16 + 16)), 16, step)
    assert "synchronizing" in str(graph.ended)
    assert MODES == [0, "error", 0]
    assert difference(net.state_dict(), expected.state_dict()) < 1e-15
    assert eager.metrics.read() == plain.metrics.read()


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
    assert "no C compiler" in str(graph.not_compiled)
    assert graph.ended is None
    assert "kernels as they are" in graph.explain()
    assert difference(net.state_dict(), expected.state_dict()) < 1e-15


class Ended(GraphStep):
    """A graph that has come to its end."""

    def __init__(self) -> None:
        self.ended = "for a test"


@pytest.mark.parametrize(("on_nan", "on_device"), [("continue", True), ("stop", False)])
def test_a_graph_that_ends_leaves_the_optimizer_as_plain_steps_want_it(
    on_nan: Any, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that may be taken back are counted on the GPU, without a graph, too; others as the user has them."""
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    net = mlp()
    job = Job(
        net,
        Supervised(nn.functional.cross_entropy),
        Arrays(vectors()),
        None,
        Settings(max_epochs=1, on_nan=on_nan),
        lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    )
    rank = Rank(job, World(0, 1, CPU))
    gpu = torch.device("cuda", 1)
    rank.world = World(0, 1, gpu)
    rank.graph = Ended()
    assert not rank._graph_step(Window(0, 0, 8, 0), None)
    assert rank.graph is None
    assert rank.notes == ["plain steps: for a test"]
    assert waited == [gpu]
    assert rank.optimizer.param_groups[0]["capturable"] is on_device
