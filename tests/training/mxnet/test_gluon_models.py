"""MXNet's models, their weights under common names, and the metrics of merit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np
import reference
from gluon_cases import CLASSES, contexts, mlp, same, vectors
from support import run_python

from manyhands import mxnet as mh
from manyhands.book import mxnet as datasets
from manyhands.book.models import WEIGHT_NAMES
from manyhands.book.mxnet import MODELS, initialise
from manyhands.training.checkpoints import tensors
from manyhands.training.data import fashion_mnist
from manyhands.training.mxnet import replicas

both_modes = pytest.mark.parametrize("numpy_like", [False, True], ids=["nd", "np"])


@pytest.mark.parametrize("name", ["lenet", "small-resnet"])
def test_the_same_logits_as_pytorch_in_numpys_mode(name: str) -> None:
    """In MXNet's older mode the contract suite looks at all of them."""
    with replicas.numpy_like():
        net = initialise(MODELS[name](num_classes=10), 0)
        replicas.restore_model(net, tensors.pack(WEIGHT_NAMES["mxnet"].from_common(reference.weights(name), name)))
        images, _ = datasets.BOOK.scale_images((replicas.native(reference.images()), replicas.native(np.zeros(4))))
        output = net(images).asnumpy()
    np.testing.assert_allclose(output, reference.logits(name), atol=1e-4)
    assert same(WEIGHT_NAMES["mxnet"].to_common(replicas.model_tensors(net), name), reference.weights(name))


def test_a_seed_gives_the_same_weights_on_every_device() -> None:
    nets = [initialise(MODELS["lenet"](), seed) for seed in (5, 5, 6)]
    first, again, other = map(replicas.model_tensors, nets)
    assert same(first, again)
    assert not same(first, other)
    bound = (6 / (1 * 25 + 6 * 25)) ** 0.5
    assert 0.9 * bound < np.abs(first["0.weight"]).max() <= bound
    spread = MODELS["lenet"]()
    spread.initialize(ctx=contexts(2))
    initialise(spread, 5)
    for array in spread[0].weight.list_data():
        assert np.array_equal(array.asnumpy(), first["0.weight"])


def test_the_values_that_come_home_are_those_of_the_first_replica() -> None:
    """Gluon's own reset_ctx takes a mean, which rounds: three equal numbers, and not the number."""
    net = mlp()
    before = replicas.model_tensors(net)
    with replicas.on(net, contexts(3)):
        pass
    assert same(replicas.model_tensors(net), before)

    def fails() -> None:
        with replicas.on(net, contexts(3), "float64"):
            assert net[0].weight.list_ctx() == contexts(3)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert net[0].weight.list_ctx() == [mx.cpu(0)]
    assert np.dtype(net[0].weight.dtype) == np.float32
    assert same(replicas.model_tensors(net), before)


# Data and metrics


@both_modes
def test_accuracy(numpy_like: bool) -> None:
    with replicas.numpy_like(numpy_like):
        scores = replicas.native(np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]], np.float32))
        for kind in ("int32", "int64", "float32"):
            labels = replicas.native(np.array([1, 0, 0], kind))
            assert mh.accuracy(scores, labels) == 2
            assert mh.accuracy(replicas.native(np.array([1, 1, 1], kind)), labels) == 1
        sums, curves = mh.Accumulator(2), mh.Animator()
        sums.add(1, scores.sum())
        curves.add(1, (scores[0, 1:2], 0.5))
        assert sums.data == pytest.approx([1, 3.0])
        assert curves.Y[0] == pytest.approx([0.9])


class Product(mx.gluon.HybridBlock):
    def hybrid_forward(self, F: Any, left: Any, right: Any, scale: Any) -> Any:
        return F.broadcast_mul(left, scale) * right


def test_a_hybrid_block_says_how_many_inputs_it_takes() -> None:
    (X, _), model = vectors(10), Product()
    model.scale = model.params.get("scale", shape=(1, 1), init="ones")
    model.initialize()
    predicted = mh.Trainer(1, devices="cpu", quiet=True).predict(model, (X, X))
    np.testing.assert_allclose(predicted.asnumpy(), X * X, rtol=1e-6)


def batches(size: int) -> list[tuple[Any, Any]]:
    X, y = vectors()
    X = X.astype(np.float32)
    return [(replicas.native(X[i : i + size]), replicas.native(y[i : i + size])) for i in range(0, len(y), size)]


@both_modes
def test_evaluation_counts_each_sample_once(numpy_like: bool) -> None:
    with replicas.numpy_like(numpy_like):
        net = mlp()
        X, y = vectors()
        expected = float((net(replicas.native(X.astype(np.float32))).asnumpy().argmax(1) == y).mean())
        for size in (1, 7, 90):
            assert mh.evaluate_accuracy_gpu(net, batches(size)) == pytest.approx(expected)
            assert mh.evaluate_accuracy_gpus(net, batches(size)) == pytest.approx(expected)
        assert mh.evaluate_accuracy_gpus(net, batches(7), mh.split_batch) == pytest.approx(expected)
        assert net[0].weight.list_ctx() == [mx.cpu(0)]
        data = [batches(7) for _ in range(2)]
    with replicas.numpy_like(not numpy_like):  # the net's mode counts, not that of the program
        assert mh.evaluate_accuracy_gpu(net, data[0]) == pytest.approx(expected)
        assert mh.evaluate_accuracy_gpus(net, data[1]) == pytest.approx(expected)


# The book's names


def test_a_scratch_model_moves_with_its_trainer() -> None:
    class Scratch(mh.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = mx.nd.ones((2, CLASSES))
            self.parts: list[Any] = []

    outer, inner = Scratch(), Scratch()
    outer.parts = [inner]
    trainer = mh.Trainer(1, quiet=True)
    assert trainer.prepare_model(outer).trainer is trainer
    outer.set_scratch_params_device(mx.cpu(1))
    assert outer.W.ctx == inner.W.ctx == mx.cpu(1)
    with mx.autograd.record():
        (outer.W * 3).sum().backward()
    assert outer.W.grad.asnumpy().tolist() == [[3.0] * CLASSES] * 2


JOURNEY = """
from mxnet import autograd, gluon, np, npx
from manyhands import mxnet as mh

npx.set_np()
net = mh.lenet()
result = mh.train(net, num_gpus=2, batch_size=256, lr=0.3, num_epochs=1)
assert result.devices == ["virtual:0", "virtual:1"], result.devices
assert net[0].weight.list_ctx() == [mh.cpu()]
_, test = mh.load_data_fashion_mnist(256)
assert abs(mh.evaluate_accuracy_gpus(net, test) - result.val_acc) < 1e-9
assert abs(mh.evaluate_accuracy_gpus(net, test, mh.split_batch) - result.val_acc) < 1e-9

# The book's loop by hand, on every device.
trainer = mh.Trainer(1, num_gpus=2)
assert trainer.gpus == mh.try_all_gpus()
trainer.prepare_model(net)
X, y = next(iter(test))
assert all(part.ctx == mh.gpu(0) for part in trainer.prepare_batch((X, y)))
steps, loss = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}), gluon.loss.SoftmaxCrossEntropyLoss()
with autograd.record():
    losses = [loss(net(X), y).sum() for X, y in zip(*mh.split_batch(X, y, trainer.gpus))]
for one in losses:
    one.backward()
steps.step(len(y))
assert (net[0].weight.data(mh.gpu(0)) == net[0].weight.data(mh.gpu(1)).as_in_ctx(mh.gpu(0))).all()
"""


def test_the_books_journey_on_two_virtual_devices() -> None:
    done = run_python(JOURNEY, MANYHANDS_VIRTUAL_DEVICES="2", MANYHANDS_DATA=str(fashion_mnist.SUBSET_DIRECTORY))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "sec/epoch on [virtual:0, virtual:1]" in done.stdout
