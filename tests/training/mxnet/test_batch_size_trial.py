"""``find_batch_size`` makes its steps on the caller's own block, and leaves no trace in it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np
from gluon_cases import CLASSES, contexts, mlp, vectors
from mxnet import autograd, gluon
from mxnet.gluon import nn

from manyhands.errors import BadSettings
from manyhands.training.mxnet import state
from manyhands.training.mxnet.step import replicas
from manyhands.training.mxnet.trainer import Trainer


class Counting(gluon.Block):  # type: ignore[misc]
    """Counts in Python, in a list and in an array that it writes to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls, self.sizes, self.seen = mlp(norm=True), 0, [], mx.nd.zeros((1,))

    def forward(self, X: Any) -> Any:
        self.calls += 1
        self.sizes.append(len(X))
        self.seen += 1
        return self.net(X)


def test_nothing_of_the_block_changes() -> None:
    net, (X, y) = Counting(), vectors(24)
    optimizer = gluon.Trainer(net.collect_params(), "adam", kvstore=None)

    def step() -> None:
        """A training step by the caller: afterwards there are gradients and an optimizer state."""
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(mx.nd.array(X)), mx.nd.array(y)).mean()
        loss.backward()
        optimizer.step(1)

    step()
    weight = net.net[0].weight
    weights, gradient, arrays = state.model_tensors(net), weight.grad().asnumpy(), weight.list_data()
    trainer = Trainer(devices=contexts(2), optimizer=optimizer, quiet=True)
    assert trainer.find_batch_size(net, (X, y), maximum=20) == 20
    for name, value in state.model_tensors(net).items():
        np.testing.assert_array_equal(value, weights[name])
    np.testing.assert_array_equal(weight.grad().asnumpy(), gradient)
    assert weight.list_data() == arrays
    assert weight.list_ctx() == contexts(1)
    assert (net.calls, net.sizes, float(net.seen.asnumpy()[0])) == (1, [24], 1.0)
    step()
    assert optimizer.optimizer.num_update == 2


def test_a_block_without_values_stays_without() -> None:
    net, (X, y) = nn.HybridSequential(), vectors(24)
    net.add(nn.Dense(8, activation="tanh"), nn.Dense(CLASSES))
    net.hybridize()
    assert Trainer(quiet=True, lr=0.1).find_batch_size(net, (X, y), maximum=20) == 20
    assert all(one._data is None and 0 in one.shape for one in replicas.distinct(net) if "weight" in one.name)
    net.initialize()
    assert net(mx.nd.array(X[:2])).shape == (2, CLASSES)


def test_what_is_no_block_is_refused() -> None:
    with pytest.raises(BadSettings, match=r"gluon\.Block"):
        Trainer(quiet=True).find_batch_size(lambda X: X, vectors(24))
