"""The book's ``Module`` and ``DataModule``: what a user subclasses."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from manyhands.training.book import data_module
from manyhands.training.book.plots import Plotting
from manyhands.training.book.vocabulary import HyperParameters


class Module(keras.Model, HyperParameters, Plotting):  # type: ignore[misc]
    """A model that knows its loss and its optimizer. Subclasses give ``net`` (or ``forward``) and ``loss``."""

    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        super().__init__()
        del self.loss  # Keras keeps there what compile() was given, and would hide the method
        self.plot_train_per_epoch = plot_train_per_epoch
        self.plot_valid_per_epoch = plot_valid_per_epoch

    def loss(self, y_hat: Any, y: Any) -> Any:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return tf.reduce_mean(cross_entropy(y_hat, y))

    def forward(self, *inputs: Any) -> Any:
        net = getattr(self, "net", None)
        if net is None:
            raise AttributeError(f"{type(self).__name__} has neither a `net` nor a `forward` of its own")
        return net(*inputs)

    def call(self, X: Any, *more: Any) -> Any:
        """Keras hands ``training`` on to the layers within."""
        return self.forward(X, *more)

    def training_step(self, batch: Any) -> Any:
        return self.loss(self(*batch[:-1], training=True), batch[-1])

    def validation_step(self, batch: Any) -> Any:
        return self.loss(self(*batch[:-1], training=False), batch[-1])

    def configure_optimizers(self) -> Any:
        return keras.optimizers.SGD(getattr(self, "lr", 0.1))


class DataModule(data_module.DataModule):
    __doc__ = data_module.DataModule.__doc__
    native = staticmethod(tf.convert_to_tensor)


def cross_entropy(y_hat: Any, y: Any) -> Any:
    """The cross-entropy of class scores, one number per sample; also of a model that ends with a softmax."""
    # TensorFlow takes two kinds alone, and labels are often bytes (Keras's own data sets have such).
    known = y if not tf.is_tensor(y) or not y.dtype.is_integer else tf.cast(y, tf.int64)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(known, before_softmax(y_hat))


def before_softmax(output: Any) -> Any:
    """The scores that a softmax was given, if the output comes from one of Keras's or of TensorFlow's."""
    if hasattr(output, "_keras_logits"):
        return output._keras_logits
    operation = None if tf.is_tensor(output) and hasattr(output, "numpy") else getattr(output, "op", None)
    return operation.inputs[0] if operation is not None and operation.type == "Softmax" else output
