"""``mh.predict`` in TensorFlow: see :mod:`manyhands.training.predict_by_fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from manyhands.training import predict_by_fit
from manyhands.training.predict_by_fit import PredictByFit, noise
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


predict = PredictByFit("tensorflow", Trainer, _trial, _gradient_bytes)


def example(name: str, batch_size: int) -> tuple[Any, Any]:
    """One of the models of ``manyhands train`` and a batch of noise."""
    return command.model(name, 0), noise(batch_size, (28, 28, 1))


def has_gpu() -> bool:
    return predict_by_fit.has_gpu(Trainer.backend)
