"""How a job runs: no reads in a step, precisions, the book's classes, metrics."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_cases import CLASSES, fit, images, mlp, tensors, vectors
from support import StopAt, Stopped

from manyhands import tensorflow as mh
from manyhands.book.tensorflow import Residual
from manyhands.cli import parity
from manyhands.errors import BadBatch, BadSettings
from manyhands.training.tensorflow import learner
from manyhands.training.tensorflow.model import names


def test_a_step_reads_nothing_and_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()
    traced: list[int] = []
    eager = type(tf.constant(0.0))
    for name in ("numpy", "_numpy", "_numpy_internal", "__float__", "__int__", "__bool__", "__array__"):
        plain = getattr(eager, name, None)
        if plain is not None:

            def counted(self: Any, *rest: Any, _plain: Any = plain, _name: str = name) -> Any:
                reads[_name] += threading.current_thread() is threading.main_thread()
                return _plain(self, *rest)

            monkeypatch.setattr(eager, name, counted)
    plain_step = learner.KerasLearner.step

    def step(self: Any, window: Any, batch: Any, factor: Any) -> None:
        before = reads.copy()
        plain_step(self, window, batch, factor)
        traced.append(self._train.experimental_get_tracing_count())
        if window.step > 0:  # the first one traces
            assert reads == before

    monkeypatch.setattr(learner.KerasLearner, "step", step)
    fit(mlp(lambda: layers.BatchNormalization()), vectors(), 3, schedule=lambda done: 1 - done)
    assert reads["numpy"] > 0  # the end of an epoch reads: the count works
    assert traced == [1] * 8  # the short last batch too


def test_a_precision_is_asked_for_and_the_callers_model_stays_in_its_own() -> None:
    seen: list[str] = []

    class Seen(layers.Layer):
        def call(self, X: Any) -> Any:
            seen.append(X.dtype.name)
            return X

    def loss(y_true: Any, y_pred: Any) -> Any:
        seen.append(y_pred.dtype.name)
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    net = [Residual(1, 2, use_1x1conv=True), Seen(), layers.Flatten(), layers.Dense(CLASSES)]
    model = keras.Sequential([layers.Input((6, 6, 1)), *net])
    before, seen[:] = model.get_weights(), []
    fit(model, images(16), epochs=1, precision="bf16", loss=loss)
    assert seen == ["bfloat16", "float32"], "layers in half precision, the loss in single"
    assert {weight.dtype for weight in model.get_weights()} == {np.dtype("float32")}
    assert not np.array_equal(model.get_weights()[0], before[0])
    assert {layer.compute_dtype for layer in model._flatten_layers()} == {"float32"}


def test_what_was_learned_comes_home_also_when_the_job_is_interrupted() -> None:
    model = mlp()
    with pytest.raises(Stopped):
        fit(model, vectors(48), 2, schedule=StopAt(3))
    assert not np.array_equal(mlp().get_weights()[0], model.get_weights()[0])


def test_an_optimizer_of_the_callers_goes_on_with_what_it_remembers() -> None:
    kept = keras.optimizers.SGD(0.05, momentum=0.9)
    twice, once = mlp(), mlp()
    data = vectors(16)  # one batch an epoch: the order does not matter
    fit(twice, data, 2, epochs=1, optimizer=kept, schedule=lambda done: 0.5)
    fit(twice, data, 1, epochs=1, optimizer=kept, schedule=lambda done: 0.5)
    fit(once, data, 1, epochs=2, schedule=lambda done: 0.5)
    assert parity.largest_difference(tensors(twice), tensors(once)) < 1e-12
    assert int(kept.iterations) == 2
    assert float(kept.learning_rate) == pytest.approx(0.05)
    with pytest.raises(BadSettings, match="another model"):
        fit(mlp(lambda: layers.Dense(2)), data, optimizer=kept)


@pytest.mark.filterwarnings("error:.*unbuilt state")
def test_the_books_classes() -> None:
    class Net(mh.Module):
        def __init__(self, width: int = 8, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = keras.Sequential([layers.Dense(width, activation="relu"), layers.Dropout(0.1), layers.Dense(2)])

        def loss(self, y_hat: Any, y: Any) -> Any:
            return tf.reduce_mean((y_hat - y) ** 2)

    class Numbers(mh.DataModule):
        def __init__(self, batch_size: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.X = tf.random.stateless_normal((30, 3), seed=(1, 2))

        def get_dataloader(self, train: bool) -> Any:
            return self.get_tensorloader((self.X, self.X[:, :2]), train, slice(0, 24) if train else slice(24, None))

    model = Net(lr=0.2)
    result = mh.Trainer(max_epochs=6, num_gpus=2, gradient_clip_val=1, quiet=True).fit(model, Numbers())
    assert result.devices == ["virtual:0", "virtual:1"]
    assert result.rows[-1]["val_loss"] < result.rows[0]["val_loss"]
    assert model.lr == 0.2
    assert model.loss(tf.ones((2, 2)), tf.zeros((2, 2))) == 1


def test_accuracy_on_one_device_and_on_all() -> None:
    X, y = images(20)
    net = keras.Sequential([layers.Flatten(), layers.BatchNormalization(), layers.Dense(CLASSES)])
    net(X[:2])
    expected = float(np.mean(np.argmax(net(X, training=False), 1) == y))
    batches = [(tf.constant(X[i : i + 7]), tf.constant(y[i : i + 7])) for i in range(0, 20, 7)]
    assert mh.accuracy(net(X, training=False), y) == 20 * expected
    assert mh.evaluate_accuracy_gpu(net, batches) == expected
    assert mh.evaluate_accuracy_gpu(net, batches, "virtual:2") == expected
    assert mh.evaluate_accuracy_gpus(net, batches) == expected
    assert mh.evaluate_accuracy_gpus(net, [(X[:2], y[:2]), *([(X[2:], y[2:])])]) == expected
    assert mh.evaluate_accuracy_gpu(lambda X: net(X, training=False), batches) == expected
    with pytest.raises(BadBatch, match="no sample"):
        mh.evaluate_accuracy_gpu(net, [])


# Names of weights


def test_names_do_not_depend_on_what_was_made_before() -> None:
    def make() -> keras.Model:
        inner = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(3)])
        return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(4), inner, keras.layers.Dense(2)])

    assert names(make()) == names(make())
    assert len(set(names(make()))) == 8
