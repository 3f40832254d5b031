"""The update on several contexts is that of one device, in float64 to 1e-12, whatever the division."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np
from gluon_cases import CLASSES, Branching, fit, mlp, rows, sequential, vectors
from mxnet import gluon
from mxnet.gluon import nn

from manyhands.book.mxnet import BOOK
from manyhands.cli.parity import LIMIT, compare, largest_difference
from manyhands.errors import BadSettings
from manyhands.training.data.order import epoch_order
from manyhands.training.data.sources import Arrays
from manyhands.training.mxnet import replicas
from manyhands.training.mxnet.optimizers import AdamW
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
