"""A loss whose mean is not over samples: its sums and counts are put together over devices and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np
from gluon_cases import CLASSES, contexts, fit, mlp, rows, sequential, vectors
from mxnet import gluon
from mxnet.gluon import nn

from manyhands.book.mxnet import MODELS
from manyhands.cli.parity import largest_difference
from manyhands.errors import BadSettings
from manyhands.mxnet import LossSum
from manyhands.training.data.sources import source
from manyhands.training.mxnet import checks, replicas
from manyhands.training.mxnet.objective import Objective
from manyhands.training.mxnet.trainer import Trainer
from manyhands.training.options import Step

CLOSE = 1e-12
WEIGHTS = np.array([1.0, 5.0, 0.2])
softmax = gluon.loss.SoftmaxCrossEntropyLoss()


def weights_of(target: Any) -> Any:
    return mx.nd.array(WEIGHTS, dtype="float64", ctx=target.ctx).take(target.astype("int32"))


def weighted_mean(output: Any, target: Any) -> Any:
    weights = weights_of(target)
    return (softmax(output, target) * weights).sum() / weights.sum()


def weighted_sum(output: Any, target: Any) -> LossSum:
    weights = weights_of(target)
    return LossSum((softmax(output, target) * weights).sum(), weights.sum())


OPTIONS: dict[str, dict[str, Any]] = {
    "an empty shard": {"step": Step(shares=[0.5, 0, 0.5])},
    "clipping and Adam": {"gradient_clip_val": 0.1, "optimizer": "adam"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_n_devices_are_one_device(name: str) -> None:
    """The update is that of the mean over the whole batch, and a test's metric that of the whole test set."""
    options = OPTIONS[name]
    data = (vectors(90), vectors(37))
    evenly = replace(options.get("step", Step()), shares=None)
    expected, plain = fit(mlp(), data, 1, loss=weighted_mean, **{**options, "step": evenly})
    losses = []  # of the tests: those of the mean are means of batches
    for devices in (1, 3):
        given = options if devices == 3 else {**options, "step": evenly}
        weights, result = fit(mlp(), data, devices, loss=weighted_sum, **given)
        assert largest_difference(weights, expected) <= CLOSE
        for row, other in zip(rows(result), rows(plain), strict=True):
            for metric in ("train_loss", "train_acc", "val_acc"):
                assert row[metric] == pytest.approx(other[metric], rel=1e-9)
        losses.append([row["val_loss"] for row in rows(result)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_a_test_loss_is_divided_once() -> None:
    """In many batches, too: not the mean of the batches' means."""
    _, result = fit(mlp(), (vectors(90), vectors(700)), 3, loss=weighted_sum, lr=0.0, max_epochs=1)
    X, y = (mx.nd.array(part, dtype="float64") for part in vectors(700))
    net = mlp()
    net.cast("float64")
    assert result.rows[0]["val_loss"] == pytest.approx(float(weighted_mean(net(X), y).asscalar()), rel=1e-9)


class Tokens(gluon.Block):  # type: ignore[misc]
    """Texts of unlike lengths, padded with -1; the loss is the mean over the tokens that are not padding."""

    def __init__(self, count: str) -> None:
        super().__init__()
        self.count = count
        self.net = sequential(nn.Dense(CLASSES, in_units=2, flatten=False))

    def forward(self, X: Any) -> Any:
        return self.net(X.reshape((len(X), 3, 2)))

    def training_step(self, batch: Any) -> Any:
        X, labels = batch
        there = labels != -1
        each = -mx.nd.pick(mx.nd.log_softmax(self(X)), mx.nd.maximum(labels, 0)) * there
        if self.count == "mean":
            return each.sum() / there.sum()
        return LossSum(each.sum(), there.sum() if self.count == "array" else int(there.sum().asscalar()))


def texts() -> Any:
    X, _ = vectors()
    labels = np.random.default_rng(2).integers(CLASSES, size=(90, 3))
    for row in range(4, 90):
        labels[row, 3 - row % 3 :] = -1
    return X, labels.astype("float64")


@pytest.mark.parametrize("count", ["array", "plain number"])
def test_padded_texts_in_a_training_step(count: str) -> None:
    expected, _ = fit(Tokens("mean"), texts(), 1)
    for devices in (1, 3):
        found, _ = fit(Tokens(count), texts(), devices)
        assert largest_difference(found, expected) <= CLOSE


def test_a_mean_over_something_else_is_refused_in_parts() -> None:
    """Although the first texts are equally long; the advice is to return a LossSum."""
    with pytest.raises(BadSettings, match=r"return mh\.LossSum\(total, count\)"):
        fit(Tokens("mean"), texts(), 3)
    with pytest.raises(BadSettings, match=r"return mh\.LossSum\(total, count\)"):
        fit(mlp(), vectors(), 3, loss=weighted_mean)


def test_the_trial_of_a_loss_leaves_the_model_as_it_is() -> None:
    """Also with dropout, statistics and a layer that is not used: the loss is a mean, and is not refused."""

    class Wider(gluon.Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.unused = mlp(dropout=0.5, norm=True), sequential(nn.Dense(2, in_units=2))

        def forward(self, X: Any) -> Any:
            return self.net(X)

    model = Wider()
    model.cast("float64")
    before = replicas.model_tensors(model)
    objective = Objective(model, lambda output, target: softmax(output, target).mean() * 2)
    assert checks.check_loss(model, objective, source(vectors())) == []
    assert largest_difference(before, replicas.model_tensors(model)) == 0
    for parameter in model.collect_params().values():
        if parameter.grad_req != "null":
            assert not parameter.data()._fresh_grad
            assert not parameter.grad().asnumpy().any()


def test_a_loss_behind_max_pooling_is_tried() -> None:
    """In evaluation mode oneDNN keeps nothing of what its gradient needs."""
    images = np.random.default_rng(0).random((32, 1, 28, 28), np.float32), np.arange(32) % 10
    net = MODELS["lenet"]()
    checks.make_parameters(net, source(images), 0)
    assert checks.check_loss(net, Objective(net, softmax), source(images)) == []


def test_what_is_not_checked_is_noted() -> None:
    def noisy(output: Any, target: Any) -> Any:
        return softmax(output + mx.nd.random.normal(shape=output.shape, dtype="float64"), target).mean() * 2

    _, result = fit(mlp(), vectors(), 2, max_epochs=1, loss=noisy)
    assert any("draws random numbers" in note for note in result.notes)
    X, y = vectors(32)
    batches = ((X[start : start + 16], y[start : start + 16]) for start in (0, 16))
    plain = lambda output, target: softmax(output, target).mean()  # noqa: E731
    _, result = fit(mlp(), batches, 2, max_epochs=1, batch_size=None, loss=plain)
    assert any("can be read only once" in note for note in result.notes)


def test_a_loss_of_gluons_that_compares_the_samples_of_a_batch() -> None:
    X, targets = np.random.default_rng(0).normal(size=(2, 40, 4)).astype(np.float32)
    net = nn.Dense(4, in_units=4)
    with pytest.raises(BadSettings, match="not a mean over the samples"):
        Trainer(1, devices=contexts(2), quiet=True, loss=gluon.loss.SDMLLoss()).fit(net, (X, targets))
