"""``mh.predict`` in TensorFlow: see :mod:`manyhands.training.predict_by_fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from manyhands.training.predict_by_fit import PredictByFit
from manyhands.training.predict_by_fit import resized as resized
from manyhands.training.tensorflow import command
from manyhands.training.tensorflow.trainer import Trainer


@contextlib.contextmanager
def _trial(model: Any, inputs: Any) -> Iterator[Any]:
    """The model itself: not every Keras model can be copied. It gets its weights back."""
    if not model.built:
        model(inputs)
    before = model.get_weights()
    try:
        yield model
    finally:
        model.set_weights(before)


def _gradient_bytes(model: Any) -> int:
    return sum(int(weight.numpy().nbytes) for weight in model.trainable_weights)


predict = PredictByFit("tensorflow", Trainer, _trial, _gradient_bytes, command.model, (28, 28, 1))
example, has_gpu = predict.example, predict.has_gpu
