"""``parallel`` in MXNet: the function itself, whatever it does; tasks over blocks and contexts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np

from manyhands import mxnet as mh


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
    """Gradients, statistics, values from NumPy."""
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
            answers = [mh.task(block)(x) for x in batches]
        for answer, x in zip(answers, batches, strict=True):
            np.testing.assert_array_equal(answer.result().asnumpy(), block(x).asnumpy())
