"""The update on several contexts is that of one device, in float64 to 1e-12, whatever the division."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np
from gluon_cases import CLASSES, Branching, contexts, fit, mlp, rows, sequential, vectors
from mxnet import gluon
from mxnet.gluon import nn

from manyhands.book.mxnet import BOOK, MODELS
from manyhands.cli.parity import LIMIT, compare, largest_difference
from manyhands.errors import BadSettings
from manyhands.mxnet import LossSum
from manyhands.training.data.order import epoch_order
from manyhands.training.data.sources import Arrays, source
from manyhands.training.mxnet import checks, replicas
from manyhands.training.mxnet.objective import Objective
from manyhands.training.mxnet.optimizers import AdamW
from manyhands.training.mxnet.trainer import Trainer
from manyhands.training.options import Step
from manyhands.training.schedules import one_cycle

CLOSE = 1e-12


def nesterov(rate: float) -> Any:
    return mx.optimizer.NAG(learning_rate=rate, momentum=0.9, wd=0.01)


def check(model: Any, data: Any, devices: int = 2, **options: Any) -> None:
    """The same training on one device and on several: weights and metrics agree."""
    alone, metrics = fit(model(), data, 1, **{**options, "step": _evenly(options)})
    together, shared = fit(model(), data, devices, **options)
    assert largest_difference(together, alone) <= CLOSE
    for row, other in zip(rows(metrics), rows(shared), strict=True):
        known = [name for name in row if row[name] is not None]
        assert [row[name] for name in known] == pytest.approx([other[name] for name in known], rel=CLOSE)


def _evenly(options: dict[str, Any]) -> Step:
    return replace(options.get("step", Step()), shares=None)


DIVISIONS: dict[str, dict[str, Any]] = {
    "uneven on three": {"batch_size": 16, "devices": 3},
    "last batch of one": {"batch_size": 89, "devices": 3},
    "an empty shard": {"step": Step(shares=[0, 1]), "optimizer": nesterov},
    "clip": {"gradient_clip_val": 0.05, "step": Step(shares=[0.6, 0.4])},
    "adam": {"optimizer": "adam", "step": Step(shares=[0.6, 0.4])},
    "schedule": {"schedule": one_cycle, "optimizer": nesterov},
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_several_contexts_are_one_device(name: str) -> None:
    check(mlp, (vectors(), vectors(37)), max_epochs=2, **DIVISIONS[name])


def test_parameters_that_are_not_used() -> None:
    """A parameter that no device used has no gradient; not zero, for weight decay and momentum would move it."""
    optimizer = nesterov
    check(Branching, vectors(), batch_size=6, optimizer=optimizer, step=Step(shares=[0.8, 0.2]), lr=0.01)
    before = replicas.model_tensors(Branching())
    after, _ = fit(Branching(), vectors(), 2, optimizer=optimizer)
    assert np.array_equal(before["unused.weight"], after["unused.weight"].astype("float32"))
    assert not np.array_equal(before["rarely.weight"], after["rarely.weight"].astype("float32"))


def test_the_optimizer_in_four_ways() -> None:
    expected, _ = fit(mlp(), vectors(), 1, optimizer="adam", lr=0.02)
    adam = mx.optimizer.Adam(learning_rate=0.02)
    of_rate = lambda rate: mx.optimizer.Adam(learning_rate=rate)  # noqa: E731
    ways: list[dict[str, Any]] = [{"optimizer": adam}] * 2  # twice: a job has its own copy
    ways += [{"optimizer": one, "lr": 0.02} for one in (of_rate, mx.optimizer.Adam)]
    for way in ways:
        assert largest_difference(fit(mlp(), vectors(), 2, **way)[0], expected) <= CLOSE
    net = mlp()
    own = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.02})
    own._optimizer.rescale_grad = 1 / 64  # as a step of its own leaves it
    assert largest_difference(fit(net, vectors(), 2, optimizer=own)[0], expected) <= CLOSE


def test_a_stream_is_divided_as_arrays_are() -> None:
    X, y = vectors()
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(X, y), batch_size=16, last_batch="keep")
    check(mlp, (loader, loader), 3, step=Step(shares=[3, 2, 1]))
    in_order = Arrays(vectors(), shuffle=False)
    assert largest_difference(fit(mlp(), loader, 2)[0], fit(mlp(), in_order, 1)[0]) <= CLOSE


@pytest.mark.parametrize("shares", [None, [0.3, 0.7]])
def test_statistics_are_those_of_the_largest_share(shares: list[float] | None) -> None:
    """Per device: each normalises by its own samples, and the model has the larger one's afterwards."""
    tensors, _ = fit(mlp(norm=True), vectors(16), 2, max_epochs=1, step=Step(shares=shares))
    order = epoch_order(0, 0, 16)
    part = order[:8] if shares is None else order[5:]
    net = mlp(norm=True)
    net.cast("float64")
    hidden = net[0](replicas.native(vectors(16)[0][part])).asnumpy()
    assert tensors["1.running_mean"] == pytest.approx(0.1 * hidden.mean(0), rel=1e-6)  # 0.1 is a float32 there


def test_no_shard_of_a_normalising_model_has_a_single_sample() -> None:
    """Its normalised value would be zero, whatever the sample."""
    _, result = fit(mlp(norm=True), vectors(17), 3, batch_size=4)
    assert [row["samples"] for row in result.rows] == [17, 17]


def test_parity_in_numpys_mode() -> None:
    """As the command measures it; in MXNet's older mode the contract suite does."""

    def make() -> Any:
        with replicas.numpy_like():
            return sequential(nn.Dense(8, in_units=6), nn.Activation("tanh"), nn.Dense(CLASSES, in_units=8))

    X, y = vectors()
    data = Arrays((X.astype(np.float32), y))
    assert [difference <= LIMIT for *_, difference in compare(BOOK, make, data, 3)] == [True] * 2
    assert not mx.util.is_np_array()


class Centred(gluon.Block):  # type: ignore[misc]
    """Its forward pass compares the samples of a batch, in front of one of Gluon's losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = sequential(nn.Dense(8, in_units=6)), sequential(nn.Dense(CLASSES, in_units=8))

    def forward(self, X: Any) -> Any:
        hidden = self.first(X)
        return self.last(hidden - hidden.mean(axis=0, keepdims=True))


def test_a_model_that_compares_samples_is_refused_in_parts() -> None:
    fit(Centred(), vectors(), max_epochs=1)
    with pytest.raises(BadSettings, match="depends on the other samples"):
        fit(Centred(), vectors(), 2, max_epochs=1)


def test_the_weight_decay_of_adamw_is_decoupled() -> None:
    """MXNet 1.9 has no such optimizer: two steps by the formula of the paper."""
    weights, mean, variance = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    ours = mx.nd.array(weights, dtype="float64")
    optimizer = AdamW(learning_rate=0.1, wd=0.5)
    state = optimizer.create_state(0, ours)
    for step, gradient in enumerate((np.array([0.3, -0.1]), np.array([0.2, 0.4])), 1):
        optimizer.update(0, ours, mx.nd.array(gradient, dtype="float64"), state)
        mean, variance = 0.9 * mean + 0.1 * gradient, 0.999 * variance + 0.001 * gradient**2
        weights = weights * (1 - 0.1 * 0.5)
        weights -= 0.1 * (mean / (1 - 0.9**step)) / (np.sqrt(variance / (1 - 0.999**step)) + 1e-8)
    assert np.allclose(ours.asnumpy(), weights, rtol=1e-5)


# A loss whose mean is not over samples: its sums and counts are put together over devices and micro-batches


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
