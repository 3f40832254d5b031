"""``parallel`` in MXNet: operations noted as they run, one CachedOp of them, and what that may not be used for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np
from mxnet.ndarray import register

from manyhands import mxnet as mh
from manyhands.backends.mxnet import planning
from manyhands.backends.runtime import Traced, call_of
from manyhands.tasks.hooks import Hooks
from manyhands.tasks.reachable import Objects


@pytest.fixture(autouse=True)
def nothing_is_left_noting() -> Iterator[None]:
    before = register._imperative_invoke, type(mx.base._LIB)
    yield
    assert (register._imperative_invoke, type(mx.base._LIB)) == before


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[Traced, Any]:
    call = call_of(planning, function, arguments, {})
    assert call is not None
    objects = Objects(Hooks(planning.tasks.memory_of, planning.tasks.parts_of)).look(function).objects
    _, trace = planning.observe(call)
    return trace(objects), call


def test_what_is_noted_is_tasks_and_one_operation() -> None:
    weight = mx.nd.ones((3, 3))

    def function(x: Any, y: Any) -> Any:
        z = mx.nd.dot(x, weight)
        first, second, _ = mx.nd.split(y, num_outputs=3)
        return {"z": z + 1, "parts": [first, second], "all": mx.nd.concat(z, y, dim=0), "x": x, "n": 3}

    x, y = mx.nd.ones((3, 3)), mx.nd.arange(9).reshape((3, 3))
    found, call = traced(function, x, y)
    by_name = {task.name: task for task in found.tasks}
    assert {"dot", "_plus_scalar", "split", "concat"} == {name.lower() for name in by_name}
    assert by_name["_plus_scalar"].reads == by_name["dot"].writes
    assert all(task.seconds > 0 for task in found.tasks)
    assert found.run is not None, found.notes
    for _ in range(2):
        result, plain = found.run(call.tensors), function(x, y)
        assert list(result) == list(plain)
        assert result["x"] is x
        assert result["n"] == 3
        for name in ("z", "all"):
            assert np.array_equal(result[name].asnumpy(), plain[name].asnumpy())
        for mine, theirs in zip(result["parts"], plain["parts"], strict=True):
            assert np.array_equal(mine.asnumpy(), theirs.asnumpy())
        weight[:] = 5  # what is from outside is read where it is


def test_arrays_of_numpys_kind_stay_what_they_are() -> None:
    with mx.util.np_shape(True), mx.util.np_array(True):
        weight = mx.np.ones((3, 3))
        found, call = traced(lambda x: {"a": mx.npx.relu(x) * 2 + weight, "s": mx.np.sum(x)}, mx.np.ones((3, 3)))
        assert found.run is not None, found.notes
        result = found.run(call.tensors)
        assert type(result["a"]) is mx.np.ndarray
        assert result["a"].asnumpy().tolist() == [[3] * 3] * 3
        assert float(result["s"].asnumpy()) == 9
        fast = mh.parallel(lambda x: mx.np.dot(x, weight) + 1)
        for _ in range(3):
            assert fast(mx.np.ones((3, 3))).asnumpy().tolist() == [[4] * 3] * 3


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * 2 if x.sum().asscalar() > 0 else -x, "reads values"),
        (lambda x: x * 2 if x.sum() > 0 else -x, "reads values"),
        (lambda x: x + mx.nd.random.normal(shape=(3, 3)), "random numbers"),
        (lambda x: x.reshape((9,)) * 2, "through a view"),
        (lambda x: x + mx.nd.array([1, 2, 3]), "from NumPy"),
        (lambda x: x[0:2], "through a view"),
    ],
)
def test_the_reason_is_told_and_plain_execution_used(function: Callable[..., Any], reason: str) -> None:
    fast, x = mh.parallel(function), mx.nd.ones((3, 3))
    for _ in range(2):
        fast(x)
    told = fast.explain()
    assert "plain execution" in told.splitlines()[0]
    assert reason in told


def test_what_is_written_in_place_is_written_once_per_call() -> None:
    total = mx.nd.zeros(3)

    def function(x: Any) -> Any:
        total[:] = total + x
        x += 1
        return total * 2

    fast, x = mh.parallel(function), mx.nd.zeros(3)
    for _ in range(4):
        fast(x)
    assert x.asnumpy().tolist() == [4] * 3
    assert total.asnumpy().tolist() == [0 + 1 + 2 + 3] * 3
    assert "writes through a view" in fast.explain()
    added = mh.parallel(lambda x: x.__iadd__(1))
    assert added(added(x)).asnumpy().tolist() == [6] * 3
    assert "writes in place" in added.explain()


def training_step(x: Any) -> Any:
    with mx.autograd.record():
        loss = (mx.nd.tanh(mx.nd.dot(x, WEIGHT)) ** 2).mean()
    loss.backward()
    return loss


def gradient(x: Any) -> Any:
    x = x * 1
    x.attach_grad()
    with mx.autograd.record():
        y = (x * x * x).sum()
    return mx.autograd.grad(y, [x], retain_graph=True)[0] + WEIGHT.grad.sum()


def in_training(x: Any) -> Any:
    with mx.autograd.train_mode():
        return NORM(x) * 2


def write(x: Any) -> Any:
    STORE[:] = np.full((3, 3), STORE.shape[0] + x.shape[0])
    return x * 2


def clear(x: Any) -> Any:
    mx.nd.reset_arrays(STORE, num_arrays=1)
    return x * 2


def update_momentum(x: Any) -> Any:
    return mx.nd.sgd_mom_update(x, x, STORE, lr=0.1, momentum=0.9)


def optimize(x: Any) -> Any:
    with mx.autograd.record():
        loss = (NORM(x) * x).sum()
    loss.backward()
    TRAINER.step(1)
    return loss


WEIGHT, STORE, NORM = mx.nd.ones((3, 3)) / 3, mx.nd.ones((3, 3)), mx.gluon.nn.BatchNorm(in_channels=3)
WEIGHT.attach_grad()
NORM.initialize()
TRAINER = mx.gluon.Trainer(NORM.collect_params(), "sgd", {"learning_rate": 0.1})


def state() -> list[Any]:
    arrays = [WEIGHT, WEIGHT.grad, STORE, *(parameter.data() for parameter in NORM.collect_params().values())]
    return [array.asnumpy().copy() for array in arrays]


@pytest.mark.parametrize("function", [training_step, gradient, in_training, write, clear, update_momentum, optimize])
def test_what_is_done_beside_operations_is_done_at_every_call(function: Callable[..., Any]) -> None:
    """Gradients, statistics, values from NumPy: a CachedOp would leave them as the first call made them."""
    before, ways = state(), []
    for way in (function, mh.parallel(function)):
        for array, values in zip([WEIGHT, WEIGHT.grad, STORE], before, strict=False):
            array[:] = values
        for parameter, values in zip(NORM.collect_params().values(), before[3:], strict=True):
            parameter.set_data(mx.nd.array(values))
        ways.append([])
        for number in range(1, 4):
            STORE[:] = 7
            result = way(mx.nd.ones((3, 3)) * number).asnumpy()
            ways[-1].append([result, *state()])
    for plain, fast in zip(*ways, strict=True):
        for one, other in zip(plain, fast, strict=True):
            np.testing.assert_array_equal(one, other)


def test_several_contexts_are_left_to_the_engine() -> None:
    x, y = mx.nd.ones((2, 2), ctx=mx.cpu(0)), mx.nd.ones((2, 2), ctx=mx.cpu(1))
    fast = mh.parallel(lambda x, y: (x * 2, y * 3, x.copyto(mx.cpu(1)) + y))
    for _ in range(2):
        assert [one.ctx for one in fast(x, y)] == [mx.cpu(0), mx.cpu(1), mx.cpu(1)]
    assert "computes on one context" in fast.explain()


def test_gluon_blocks() -> None:
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(4, activation="relu"), mx.gluon.nn.BatchNorm(), mx.gluon.nn.Dropout(0.5))
    net.initialize()
    fast, x = mh.parallel(net), mx.nd.ones((2, 3))
    for _ in range(4):
        assert np.allclose(fast(x).asnumpy(), net(x).asnumpy(), rtol=1e-5)
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() + 1)
    assert np.allclose(fast(x).asnumpy(), net(x).asnumpy(), rtol=1e-5)
    net.hybridize()
    assert np.allclose(fast(x).asnumpy(), net(x).asnumpy(), rtol=1e-5)


def test_under_record_gradients_flow() -> None:
    fast = mh.parallel(lambda x: (x * x).sum())
    x = mx.nd.array([1, 2, 3])
    x.attach_grad()
    for _ in range(3):
        with mx.autograd.record():
            loss = fast(x)
        loss.backward()
        assert x.grad.asnumpy().tolist() == [2, 4, 6]
    assert "autograd.record" in fast.explain()


def test_tasks_do_as_the_thread_that_gave_them() -> None:
    x = mx.nd.ones(3)
    view = x[1:3]
    with mx.cpu(1), mx.autograd.train_mode(), mh.parallel(threads=3):
        assert mh.task(mx.autograd.is_training)().result()
        assert mh.task(mx.current_context)().result() == mx.cpu(1)
        for _ in range(4):
            mh.task(lambda t: t.__imul__(2), writes=(view,))(view)
        assert mh.task(lambda t: t.asnumpy().tolist())(x).result() == [1, 16, 16]


@pytest.mark.parametrize("kind", ["hybridized", "shapes unknown", "both", "from symbols"])
def test_tasks_share_a_block_from_its_first_call_on(kind: str) -> None:
    """A first call traces the block and makes values; two threads in one CachedOp end the process."""
    for _ in range(4):
        units = 0 if kind in ("shapes unknown", "both") else 8
        block = mx.gluon.nn.HybridSequential()
        for _ in range(4):
            block.add(mx.gluon.nn.Dense(8, in_units=units, activation="tanh"))
        block.initialize()
        if kind in ("hybridized", "both"):
            block.hybridize()
        if kind == "from symbols":
            data = mx.sym.var("data")
            block = mx.gluon.SymbolBlock([block(data)], [data], params=block.collect_params())
        batches = [mx.nd.random.normal(shape=(2, 8)) for _ in range(6)]
        with mh.parallel(threads=4):
            answers = [mh.task(lambda x, block=block: block(x))(x) for x in batches]
        for answer, x in zip(answers, batches, strict=True):
            np.testing.assert_array_equal(answer.result().asnumpy(), block(x).asnumpy())
