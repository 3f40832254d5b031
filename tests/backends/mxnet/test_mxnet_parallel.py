"""``parallel`` in MXNet: the function itself, whatever it does; tasks over blocks and contexts."""

from __future__ import annotations

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np

from manyhands import mxnet as mh


def test_gluon_blocks() -> None:
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(4, activation="relu"), mx.gluon.nn.BatchNorm(), mx.gluon.nn.Dropout(0.5))
    net.initialize()
    fast, x = mh.parallel(net), mx.nd.ones((2, 3))
    for _ in range(2):
        assert np.allclose(fast(x).asnumpy(), net(x).asnumpy(), rtol=1e-5)
        net.hybridize()


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
