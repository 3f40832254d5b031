"""Explicit tasks over PyTorch: options, undeclared writes, modules, and the modes of the thread that gives a task."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyhands import torch as mh
from manyhands.errors import EngineError, UndeclaredWrite

# Options


@pytest.mark.parametrize("option", [{"memory": 2.0}, {"compile": True}, {"reuse_outputs": True}], ids=str)
def test_a_scope_refuses_what_only_functions_have(option: dict[str, Any]) -> None:
    name = next(iter(option))
    with pytest.raises(EngineError, match=rf"parallel\(fn, {name}=") as caught, mh.parallel(**option):
        pass
    assert f"with parallel({name}=" in str(caught.value)


def test_a_function_refuses_threads() -> None:
    with pytest.raises(EngineError, match="threads=2"):
        mh.parallel(torch.sin, threads=2)  # type: ignore[call-overload]
    with pytest.raises(EngineError, match="threads=2"):
        mh.parallel(threads=2)(torch.sin)


# Writes


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_write_that_was_not_declared_is_an_error(synchronous: bool) -> None:
    x = torch.zeros(3)
    lesson = pytest.raises(UndeclaredWrite, match=r"Tensor of shape \(3,\).*writes=\(x,\)")
    with mh.parallel(synchronous=synchronous):
        for write, given in (
            (lambda v: v.add_(1), x),
            (lambda v: v[0][:1].add_(1), [x]),
            (lambda v: v["x"].zero_(), {"x": x}),
            (lambda _: x.add_(1), x.view(3)),
            (lambda v: v.add_(1), mh.task(torch.zeros)(3)),
        ):
            with lesson:
                mh.task(write)(given).result()
        with lesson:
            mh.task(x.add_)(1).result()
    with lesson, mh.parallel(synchronous=synchronous):
        mh.task(lambda v: v.add_(1))(x)


def test_a_module_is_read_and_written_with_its_parameters_and_buffers() -> None:
    layer, norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def slow(module: nn.Module) -> None:
        time.sleep(0.03)
        with torch.no_grad():
            for one in (*module.parameters(), *module.buffers()):
                one.zero_().add_(3)

    with mh.parallel(threads=2):
        mh.task(slow, writes=(layer,))(layer)
        assert mh.task(torch.clone)(layer.weight).result().tolist() == [[3.0, 3.0], [3.0, 3.0]]
        mh.task(slow, writes=(norm,))(norm)
        assert mh.task(torch.clone)(norm.running_mean).result().tolist() == [3.0, 3.0]
        early = mh.task(lambda module: time.sleep(0.03) or module.weight.detach().clone())(layer)
        called = mh.task(layer)(torch.ones(1, 2))
        mh.task(lambda: layer.weight.detach().zero_(), writes=(layer.weight,))()
        assert early.result().tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert called.result().tolist() == [[9.0, 9.0]]
        with pytest.raises(UndeclaredWrite, match="layer with running averages"):
            mh.task(norm)(torch.ones(3, 2)).result()
        assert mh.task(norm, writes=(norm,))(torch.ones(3, 2)).result().shape == (3, 2)


def test_what_is_watched_is_what_a_task_finds_when_it_begins() -> None:
    """Another tensor was put into a list, another parameter into a module, by tasks that declared it."""
    layer, box = nn.Linear(2, 2), [torch.zeros(2)]

    def put(new: torch.Tensor) -> None:
        time.sleep(0.01)
        box[0] = new
        layer.bias = nn.Parameter(new, requires_grad=False)

    lesson = pytest.raises(UndeclaredWrite, match=r"of shape \(2,\)")
    with mh.parallel(threads=2):
        for write, given in ((lambda held: held[0].add_(1), box), (lambda module: module.bias.add_(1), layer)):
            mh.task(put, writes=(box, layer))(torch.zeros(2))
            with lesson:
                mh.task(write)(given).result()
        last = torch.zeros(2)
        mh.task(put, writes=(box, layer))(last)
        mh.task(lambda held: held[0].add_(1), writes=(last,))(box)
    assert last.tolist() == [1.0, 1.0]


# Modes


def modes() -> tuple[Any, ...]:
    x = torch.ones(2, 2)
    return (
        torch.mm(x, x).dtype,
        x.is_inference(),
        x.device.type,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
    )


@contextmanager
def for_the_time_being(change: Any, value: Any, back: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(back)


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.device("meta"),
        lambda: for_the_time_being(functools.partial(torch.set_autocast_dtype, "cuda"), torch.bfloat16, torch.float16),
        lambda: for_the_time_being(torch.set_autocast_cache_enabled, False, True),
    ],
    ids=["autocast", "inference", "no_grad", "device", "cuda dtype", "cache"],
)
def test_a_task_has_the_modes_of_the_thread_that_gave_it(mode: Any) -> None:
    plain = modes()
    with mh.parallel(threads=1):
        with mode():
            expected = modes()
            inside = mh.task(modes)()
        outside = mh.task(modes)()
        assert expected != plain
        assert inside.result() == expected
        assert outside.result() == plain
    with mode(), mh.parallel(threads=1):
        assert mh.task(modes)().result() == expected


@pytest.mark.parametrize("under", [torch.enable_grad, torch.no_grad])
def test_a_task_keeps_its_grad_mode_to_itself(under: Any) -> None:
    """Also where it sets it without a ``with``."""
    with mh.parallel(synchronous=True), under():
        before = torch.is_grad_enabled()
        mh.task(torch.set_grad_enabled)(not before)
        assert torch.is_grad_enabled() == before
    with mh.parallel(threads=1), under():
        mh.task(torch.set_grad_enabled)(not before)
        assert mh.task(torch.is_grad_enabled)().result() == before


def test_a_task_that_does_another_one_gives_it_that_ones_modes() -> None:
    """One thread, and a task under a mode that waits for one that was given without: it does it itself."""
    held: list[Any] = []
    ready = threading.Event()

    def waits() -> Any:
        ready.wait(60)
        return held[0].result(), modes()

    with mh.parallel(threads=1):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), torch.device("meta"):
            expected = modes()
            first = mh.task(waits)()
        held.append(mh.task(modes)())
        ready.set()
        assert first.result(timeout=60) == (modes(), expected)


@dataclass(frozen=True)
class Batch:
    x: Any


@pytest.mark.parametrize(
    "reading",
    [
        lambda table: mh.task(lambda batch: batch.x.clone())(Batch(table)),
        lambda table: mh.task(functools.partial(torch.clone, table))(),
        lambda table: mh.task(table.clone)(),
    ],
    ids=["dataclass", "partial", "method"],
)
def test_what_holds_a_tensor_is_read_with_it(reading: Callable[..., Any]) -> None:
    table = torch.zeros(3)
    with mh.parallel(threads=2):
        mh.task(lambda one: time.sleep(0.03) or one.add_(1), writes=(table,))(table)
        assert reading(table).result().tolist() == [1.0, 1.0, 1.0]
        assert mh.task(lambda batch: batch.x.tolist())(Batch(mh.task(torch.ones)(2))).result() == [1.0, 1.0]


def test_an_optimizer_is_read_and_written_with_its_weights() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 2)).sum().backward()
    before = layer.weight.detach().clone()
    with mh.parallel(threads=2):
        mh.task(lambda one: time.sleep(0.03) or one.step(), writes=(optimizer,))(optimizer)
        after = mh.task(lambda module: module.weight.detach().clone())(layer).result()
        assert torch.equal(after, before - 0.1 * layer.weight.grad)
        with pytest.raises(UndeclaredWrite, match="step"):
            mh.task(optimizer.step)().result()


def test_a_gradient_is_a_part_of_its_weight() -> None:
    layer = nn.Linear(2, 2)
    with mh.parallel(threads=2):
        with pytest.raises(UndeclaredWrite, match="backward"):
            mh.task(lambda module: module(torch.ones(1, 2)).sum().backward())(layer).result()
        mh.task(lambda module: module(torch.ones(1, 2)).sum().backward(), writes=(layer,))(layer)
        assert mh.task(lambda module: module.bias.grad.tolist())(layer).result() == [2.0, 2.0]


# Memory


@pytest.mark.parametrize(
    "aliases",
    [
        lambda a: (torch.from_numpy(a), a),
        lambda a: (a, torch.from_numpy(a)),
        lambda a: (torch.from_numpy(a), torch.from_numpy(a)),
        lambda a: (torch.from_numpy(a[2:]), torch.from_numpy(a)),
        lambda a: (torch.from_numpy(a), torch.from_numpy(a[2:])),
        lambda a: (torch.from_numpy(a[1:]), a[::2]),
        lambda a: (a[1:3], a[2:]),
        lambda a: (memoryview(a), torch.from_numpy(a)),
        lambda a: (torch.from_numpy(a).numpy(), torch.from_numpy(a).detach()),
        lambda a: ((both := torch.from_numpy(a).view(2, 3))[0].data, both.t()),
    ],
)
def test_objects_in_one_memory_are_one_for_the_order(aliases: Callable[[Any], tuple[Any, Any]]) -> None:
    one, other = aliases(np.zeros(6))

    def fill(held: Any) -> None:
        time.sleep(0.02)
        for place in range(len(held)):
            held[place] = 7.0

    with mh.parallel(threads=2):
        mh.task(fill, writes=(one,))(one)
        read = mh.task(lambda held: float(held.max()))(other)
        mh.task(fill, writes=(other,))(one)
        assert read.result() == 7.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = [torch.zeros(2)]
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "write",
    [
        lambda net: net.steps[0].add_(1),
        lambda net: net.steps.append(1),
        lambda net: setattr(net, "last", torch.ones(1)),
        lambda net: net.inner[0].weight.data.add_(1),
        lambda net: net.inner[0].weight.grad.data.zero_(),
        lambda net: net.inner[0].weight.grad.zero_(),
        lambda net: setattr(net.inner[0], "bias", nn.Parameter(torch.zeros(2))),
        lambda net: net.eval(),
        lambda net: net.register_buffer("mean", torch.zeros(2)),
    ],
)
def test_all_of_a_module_is_watched(write: Callable[[Any], Any]) -> None:
    net = Net()
    net(torch.ones(1, 2)).sum().backward()
    with mh.parallel(threads=2):
        assert mh.task(net)(torch.ones(1, 2)).result().shape == (1, 2)
        with pytest.raises(UndeclaredWrite):
            mh.task(write)(net).result()
        mh.task(write, writes=(net,))(net)


def test_a_gradient_is_known_by_its_memory() -> None:
    weight = torch.zeros(2, requires_grad=True)
    (weight * 1).sum().backward()
    gradient = weight.grad

    def slow(one: torch.Tensor) -> None:
        time.sleep(0.02)
        (one * 2).sum().backward()

    with mh.parallel(threads=2):
        mh.task(slow, writes=(weight,))(weight)
        assert mh.task(torch.clone)(gradient).result().tolist() == [3.0, 3.0]


def test_tensors_on_virtual_devices_are_known_by_what_is_inside() -> None:
    def slow(one: torch.Tensor) -> None:
        before = one[:2] + 1
        time.sleep(0.002)
        one[:2].copy_(before)

    with mh.virtual_devices(2, as_cuda=False):
        x = torch.zeros(4, device="cpu:1")
        with pytest.raises(UndeclaredWrite), mh.parallel(threads=2):
            mh.task(slow)(x)
        x.zero_()
        with mh.parallel(threads=2):
            for part in (x, x.view(2, 2)[0], x[:3], x.detach(), x):
                mh.task(slow, writes=(part,))(x)
        assert x[0].item() == 5.0
