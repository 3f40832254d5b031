"""A compiled Keras model trains as ``model.fit`` trains it, or is refused with what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_cases import CLASSES, fit, mlp, tensors, vectors

from manyhands import tensorflow as mh
from manyhands.cli import parity
from manyhands.errors import BadSettings, UnknownOption
from manyhands.training.options import Checkpoints

X, Y = vectors(32)
BATCHES = [(X[start : start + 8], Y[start : start + 8]) for start in range(0, 32, 8)]
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model: Any, **options: Any) -> Any:
    model.compile(keras.optimizers.SGD(0.1), SPARSE, **options)
    return model


def train(model: Any, data: Any, **how: Any) -> Any:
    return fit(model, data, **{"optimizer": None, "lr": None, "batch_size": 8, **how})


def test_a_trained_weight_that_a_layer_assigns_is_refused() -> None:
    dense = layers.SpectralNormalization(layers.Dense(8, activation="tanh"))
    model = compiled(keras.Sequential([layers.Input((6,)), dense, layers.Dense(CLASSES)]))
    with pytest.raises(BadSettings, match=r"dense.*/kernel is trained, and a layer assigns it"):
        train(model, BATCHES)


def test_state_from_batch_to_batch_is_refused() -> None:
    rows = X.reshape(32, 2, 3)
    model = keras.Sequential([layers.Input(batch_shape=(8, 2, 3)), layers.GRU(4, stateful=True, name="memory")])
    with pytest.raises(BadSettings, match=r"layer 'memory' has stateful=True.*Make it with stateful=False"):
        train(compiled(model), (rows, Y))


# Compiled metrics


def squared(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_pred), axis=-1)


def test_compiled_metrics_of_any_kind_are_those_of_evaluate() -> None:
    entropy = keras.metrics.SparseCategoricalCrossentropy(name="entropy", from_logits=True)
    metrics = ["accuracy", "sparse_top_k_categorical_accuracy", squared, entropy]
    model = compiled(mlp(dtype="float32"), metrics=metrics)
    stopping = mh.EarlyStopping("val_entropy", patience=9)
    row = train(model, ((X, Y), (X[:27], Y[:27])), devices=2, callbacks=[stopping]).rows[-1]
    expected = model.evaluate(X[:27], Y[:27], verbose=0, return_dict=True)
    assert row["val_acc"] == pytest.approx(expected.pop("accuracy"))
    assert {name: row[f"val_{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 4
    assert mh.Trainer(quiet=True).evaluate(model, (X[:27], Y[:27]))["entropy"] == pytest.approx(expected["entropy"])
    assert any(
        "metrics of model.compile are computed over validation data" in note
        for note in train(model, (X, Y), epochs=1).notes
    )


def test_compiled_metrics_of_several_outputs() -> None:
    inputs = layers.Input((6,))
    model = keras.Model(
        inputs, {"price": layers.Dense(1, name="price")(inputs), "kind": layers.Dense(3, name="kind")(inputs)}
    )
    model.compile("sgd", {"price": "mse", "kind": SPARSE}, metrics={"price": ["mae"], "kind": ["accuracy"]})
    data = X, {"price": X[:, :1], "kind": Y}
    row = train(model, (data, data)).rows[-1]
    expected = model.evaluate(*data, verbose=0, return_dict=True)
    for name in ("price_mae", "kind_accuracy"):
        assert row[f"val_{name}"] == pytest.approx(expected[name], rel=1e-5)


# Weights of classes, callbacks, probabilities


def test_weights_of_classes_are_weights_of_samples() -> None:
    weights = np.array([1.0, 5.0, 0.2])
    by_keras, ours = compiled(mlp(dtype="float32")), compiled(mlp(dtype="float32"))
    by_keras.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False, class_weight=dict(enumerate(weights)))
    with pytest.raises(UnknownOption, match=r"class_weight: give .*fit\(model, \(X, y, weights\[y\]\)\)"):
        mh.Trainer(2).fit(ours, (X, Y), class_weight=dict(enumerate(weights)))
    train(ours, [(*batch, weights[batch[1]]) for batch in BATCHES], devices=2)
    assert parity.largest_difference(tensors(ours), tensors(by_keras)) < 1e-5


def test_early_stopping_restores_the_best_weights_after_a_resume(tmp_path: Path) -> None:
    """Also where the best epoch, and the sign of min_delta, are from before."""

    def stopping() -> Any:
        return keras.callbacks.EarlyStopping("val_loss", patience=3, min_delta=0.5, restore_best_weights=True)

    how: dict[str, Any] = {"epochs": 8, "checkpoints": Checkpoints(keep=1)}
    whole, resumed = compiled(mlp(dtype="float32")), compiled(mlp(dtype="float32"))
    result = train(whole, (BATCHES, (X, Y)), epochs=8, callbacks=[stopping()])
    assert len(result.rows) == 4  # the first epoch is the best
    assert "EarlyStopping" in str(result.stopped)
    train(resumed, (BATCHES, (X, Y)), run=tmp_path / "run", **{**how, "epochs": 2}, callbacks=[stopping()])
    other = compiled(mlp(dtype="float32"))
    again = train(other, (BATCHES, (X, Y)), run=tmp_path / "run", **how, resume="auto", callbacks=[stopping()])
    assert len(again.rows) == 4
    for one, two in zip(whole.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


class Recorded(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.moments: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.moments.append(("train begins", self.params["epochs"]))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.moments.append((epoch, sorted(logs), self.model.get_weights()[0].sum()))

    def on_train_end(self, logs: Any = None) -> None:
        self.moments.append("train ends")


def test_they_see_keras_names_and_the_weights_of_the_moment(tmp_path: Path) -> None:
    recorded, history, seen = Recorded(), keras.callbacks.History(), []
    every = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    best = keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras"), monitor="val_loss", save_best_only=True)
    model = mlp()
    result = fit(model, (vectors(), vectors(9)), 2, callbacks=[recorded, history, every, best])
    names = ["accuracy", "loss", "val_accuracy", "val_loss"]
    first, *epochs, last = recorded.moments
    assert (first, last) == (("train begins", 2), "train ends")
    assert [epoch[:2] for epoch in epochs] == [(0, names), (1, names)]
    assert epochs[0][2] != epochs[1][2] == model.get_weights()[0].sum()
    assert history.history["val_loss"] == [row["val_loss"] for row in result.rows]
    assert seen == [0, 1]
    saved = keras.models.load_model(tmp_path / "best.keras")
    assert [one.shape for one in saved.get_weights()] == [one.shape for one in model.get_weights()]


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (lambda: keras.callbacks.ReduceLROnPlateau(), "schedule="),
        (lambda: keras.callbacks.LambdaCallback(on_train_batch_end=print), "LambdaCallback has on_train_batch_end"),
        (lambda: keras.callbacks.TensorBoard(), r"mh\.loggers\.TensorBoardLogger"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_write(callback: Any, words: str) -> None:
    with pytest.raises(BadSettings, match=words):
        fit(mlp(), vectors(), callbacks=[callback()])


class Probabilities(keras.Model):
    def __init__(self, softmax: Any) -> None:
        super().__init__()
        self.dense, self.softmax = (
            layers.Dense(CLASSES, kernel_initializer=keras.initializers.GlorotUniform(3)),
            softmax,
        )

    def call(self, inputs: Any) -> Any:
        return self.softmax(self.dense(inputs))


def test_probabilities_are_not_read_as_scores() -> None:
    """Whether Keras's softmax made them or TensorFlow's."""
    data = X.astype(np.float32), Y
    losses = [
        fit(Probabilities(softmax), data, epochs=1, lr=0.0, loss="cross_entropy").rows[0]["train_loss"]
        for softmax in (tf.identity, keras.activations.softmax, tf.nn.softmax)
    ]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)
