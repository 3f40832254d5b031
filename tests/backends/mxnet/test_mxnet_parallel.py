"""``parallel`` in MXNet: the function itself, whatever it does; tasks over blocks and contexts."""

from __future__ import annotations

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np

from manyhands import mxnet as mh


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
