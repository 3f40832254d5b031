"""Weights of samples as Gluon's losses take them; arrays that a model writes to in place."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
from gluon_cases import CLASSES, contexts, mlp, vectors
from mxnet import autograd, gluon

from manyhands.training.mxnet import state
from manyhands.training.mxnet.trainer import Trainer
from manyhands.training.options import Step

COUNT = 30
WEIGHTS = np.random.default_rng(7).uniform(size=COUNT)


def trained(devices: int, data: Any, loss: Any, **how: Any) -> tuple[dict[str, Any], Any]:
    net = mlp()
    how = {"batch_size": COUNT, "lr": 0.5, "loss": loss, "quiet": True, "precision": "fp64", **how}
    result = Trainer(1, devices=contexts(devices), **how).fit(net, data)
    return state.model_tensors(net), result


def by_hand(loss: Any, target: Any, weight: Any) -> dict[str, Any]:
    """One step of Gluon's own trainer."""
    net = mlp()
    net.cast("float64")
    X = mx.nd.array(vectors(COUNT)[0], dtype="float64")
    of_gluon = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    with autograd.record():
        value = loss(net(X), mx.nd.array(target, dtype="float64"), mx.nd.array(weight, dtype="float64"))
    value.backward()
    of_gluon.step(COUNT)
    return state.model_tensors(net)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_weights_count_as_in_gluon_on_any_number_of_devices(kind: str) -> None:
    X, y = vectors(COUNT)
    loss = gluon.loss.SoftmaxCrossEntropyLoss() if kind == "classes" else gluon.loss.L2Loss()
    target = y if kind == "classes" else np.eye(CLASSES)[y]
    wanted = by_hand(loss, target, WEIGHTS[:, None])
    for devices, how in ((1, {}), (3, {"step": Step(accumulate=2)})):
        data = (X, target, WEIGHTS)
        found, result = trained(devices, (data, data), loss, **how)
        for name, tensor in found.items():
            np.testing.assert_allclose(tensor, wanted[name], rtol=1e-5, atol=1e-7)
        assert (result.rows[0]["val_acc"] is not None) == (kind == "classes")


def test_an_array_that_is_written_in_place_is_noted() -> None:
    class Counting(gluon.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen, self.still = mlp(), mx.nd.zeros((1,)), mx.nd.zeros((1,))

        def forward(self, X: Any) -> Any:
            self.seen += 1
            return self.net(X)

    result = Trainer(1, devices=contexts(1), batch_size=30, quiet=True).fit(Counting(), vectors(COUNT))
    assert [note for note in result.notes if "Counting.seen is an array that the model writes to in place" in note]
    assert not any("still" in note for note in result.notes)
