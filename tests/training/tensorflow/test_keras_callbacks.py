"""Keras's own callbacks, at the moments that the trainer has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
from keras_cases import fit, mlp, vectors

from manyhands.errors import BadSettings


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
