"""What cannot be trained is refused with the reason; what only looks odd is trained."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np
from gluon_cases import CLASSES, contexts, fit, mlp, same, sequential, vectors
from mxnet import gluon
from mxnet.gluon import nn

from manyhands.book.mxnet import BOOK
from manyhands.errors import (
    BadBatch,
    BadLabels,
    BadSettings,
    LossIsNotANumber,
    NotATensor,
)
from manyhands.training.data.order import epoch_order
from manyhands.training.mxnet import replicas
from manyhands.training.mxnet.trainer import Trainer

BATCH = 8


def spoilt(number: int) -> Any:
    X, y = vectors(40)
    X[number] = np.nan
    return X, y


@pytest.mark.parametrize("devices", [1, 3])
def test_a_loss_that_is_no_number(devices: int) -> None:
    """The step and its samples are named, the same on any number of devices, whichever had the sample."""
    for number in (17, 18):
        step = epoch_order(0, 0, 40).tolist().index(number) // BATCH
        net = mlp()
        with pytest.raises(LossIsNotANumber, match=rf"step {step} is not a number .*samples .*\b{number}\b"):
            fit(net, spoilt(number), devices, batch_size=BATCH, max_epochs=1)
        assert net[0].weight.list_ctx() == contexts(1)  # it is home again


def test_bad_samples_that_only_the_gradients_show() -> None:
    """MXNet's ReLU makes 0 of NaN: the loss stays a number, and the weights do not."""
    X, y = spoilt(17)

    def net() -> Any:
        return sequential(nn.Dense(8, activation="relu", in_units=X.shape[1]), nn.Dense(CLASSES, in_units=8))

    with pytest.raises(LossIsNotANumber, match=r"a gradient of step.*The data are the cause: X has"):
        fit(net(), (X, y), 1, batch_size=BATCH, max_epochs=1)


def test_a_model_without_parameters() -> None:
    frozen = mlp()
    frozen.collect_params().setattr("grad_req", "null")
    for model in (nn.Flatten(), frozen):
        with pytest.raises(BadSettings, match="no parameters that could be trained"):
            fit(model, vectors())
    with pytest.raises(BadSettings, match=r"gluon\.Block"):
        Trainer(1, quiet=True).fit(len, vectors())
    sparse = nn.Sequential()
    sparse.add(nn.Embedding(9, 4, sparse_grad=True), nn.Dense(CLASSES))
    with pytest.raises(BadSettings, match="sparse"):
        fit(sparse, vectors())


@pytest.mark.parametrize(("label", "numpy_like"), [(CLASSES, False), (-1, True)])
def test_labels_out_of_range(label: int, numpy_like: bool) -> None:
    """MXNet itself would take the nearest class."""
    X, y = vectors()
    y[5] = label
    with replicas.numpy_like(numpy_like):
        loader = gluon.data.DataLoader(gluon.data.ArrayDataset(X, y.astype(np.float32)), batch_size=16)
        for data, devices in (((X, y), 1), ((vectors(), (X, y)), 2), (loader, 2)):
            with pytest.raises(BadLabels, match=f"the model has {CLASSES} outputs"):
                fit(mlp(), data, devices)


def test_a_loss_that_is_no_mean() -> None:
    softmax = gluon.loss.SoftmaxCrossEntropyLoss()

    def summed(output: Any, target: Any) -> Any:
        return softmax(output, target).sum()

    with pytest.raises(BadSettings, match=r"one number per sample .*their mean"):
        fit(mlp(), vectors(), loss=summed, devices=2)
    fit(mlp(), vectors(), 1, loss=summed, lr=0.001)
    with pytest.raises(BadBatch, match="one number per sample"):
        fit(mlp(), vectors(), 1, loss=lambda output, target: output.sum(axis=0))


def test_empty_data() -> None:
    X, y = vectors()
    empty = (X[:0], y[:0])
    for data in (empty, gluon.data.ArrayDataset(*empty), [], iter([])):
        with pytest.raises((BadBatch, NotATensor)):
            fit(mlp(), data)
    for wrong in (None, 3, object()):
        with pytest.raises(NotATensor):
            fit(mlp(), wrong)
    with pytest.raises(BadBatch, match="same number"):
        fit(mlp(), (X, y[:5]))
    with pytest.raises(NotATensor, match="a loader that gives batches"):
        fit(mlp(), gluon.data.SimpleDataset([1, 2]))
    with pytest.raises(BadBatch, match="only one part"):
        fit(mlp(), X)
    with pytest.raises(BadBatch, match="gave no batch"):
        fit(nn.Dense(CLASSES), [])  # its parameters wait for a first batch, too


def test_samples_of_whole_numbers() -> None:
    X, y = vectors()
    for net in (nn.Dense(CLASSES), nn.Dense(CLASSES, in_units=X.shape[1])):
        with pytest.raises(BadBatch, match=r"Dense does not take it .*If these uint8 are not .*X\.astype\('float32'\)"):
            fit(net, (np.zeros(X.shape, np.uint8), y))
    words = sequential(nn.Embedding(5, 4), nn.Dense(CLASSES, in_units=4 * X.shape[1]))
    fit(words, (np.zeros(X.shape, np.int32), y))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadSettings, match="no distributed key-value store"):
        fit(mlp(), vectors())
    with pytest.raises(BadSettings, match="no distributed key-value store"):
        BOOK.from_first(lambda: 1)


# What is done for a model that is not ready


def test_a_model_that_nobody_initialised() -> None:
    """Its parameters are drawn by the job's seed, those of layers that do not know their inputs too."""

    def net() -> Any:
        made = nn.HybridSequential()
        made.add(nn.Dense(8), nn.BatchNorm(), nn.Dense(CLASSES))
        return made

    one, again, other = (fit(net(), vectors(), 2, seed=seed)[0] for seed in (0, 0, 1))
    assert same(one, again)
    assert not same(one, other)
    partly = mlp()
    before = replicas.model_tensors(partly)
    partly.add(nn.Dense(CLASSES, in_units=CLASSES))
    after, _ = fit(partly, vectors(), 2, lr=0.0)
    assert all(np.array_equal(after[name].astype("float32"), before[name]) for name in before)


def test_a_model_on_several_devices_already() -> None:
    net = mlp()
    net.collect_params().reset_ctx(contexts(3))
    expected, _ = fit(mlp(), vectors(), 1)
    weights, _ = fit(net, vectors(), 2)
    assert net[0].weight.list_ctx() == contexts(3)
    assert np.abs(weights["0.weight"] - expected["0.weight"]).max() < 1e-12
    for array in net[0].weight.list_data():
        assert np.array_equal(array.asnumpy(), weights["0.weight"])


@pytest.mark.parametrize("numpy_like", [False, True])
def test_a_model_of_the_other_mode(numpy_like: bool) -> None:
    """It is trained in the mode in which it was made, and the program's stays."""
    expected, _ = fit(mlp(), vectors(), 2)
    with replicas.numpy_like(numpy_like):
        net = mlp()
    with replicas.numpy_like(not numpy_like):
        weights, _ = fit(net, (vectors(), vectors(10)), 2)
        assert mx.util.is_np_array() is not numpy_like
    assert same(weights, expected)


@pytest.mark.parametrize("initialised", [False, True])
def test_images_without_an_axis_of_channels(initialised: bool) -> None:
    net = nn.HybridSequential()
    net.add(nn.Conv2D(2, 3), nn.Dense(CLASSES))
    if initialised:
        net.initialize()
    images, labels = np.zeros((8, 5, 5), np.float32), np.zeros(8, np.int32)
    with pytest.raises(BadBatch, match=r"shape \(5, 5\), and HybridSequential .*axis of channels: give X\[:, np"):
        Trainer(1, quiet=True).fit(net, (images, labels))
