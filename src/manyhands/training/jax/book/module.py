"""The book's ``Module`` and ``DataModule``: what a user subclasses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from manyhands.training.book import data_module
from manyhands.training.book.plots import Plotting
from manyhands.training.book.vocabulary import HyperParameters


class _Kept(dict[str, Any]):
    """Arguments as one thing, not looked into: NNX compares and hashes what is no array."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]


class Module(nnx.Module, HyperParameters, Plotting):  # type: ignore[misc]
    """A model that knows its loss and its optimizer. Subclasses give ``net`` (or ``__call__``) and ``loss``."""

    _kept_in = _Kept

    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        self.plot_train_per_epoch = plot_train_per_epoch
        self.plot_valid_per_epoch = plot_valid_per_epoch

    def loss(self, y_hat: Any, y: Any) -> jax.Array:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return cross_entropy(y_hat, y).mean()

    def __call__(self, *inputs: Any) -> Any:
        if not hasattr(self, "net"):
            raise AttributeError(f"{type(self).__name__} has neither a `net` nor a `__call__` of its own")
        return self.net(*inputs)

    def training_step(self, batch: Any) -> jax.Array:
        return self.loss(self(*batch[:-1]), batch[-1])

    def validation_step(self, batch: Any) -> jax.Array:
        return self.loss(self(*batch[:-1]), batch[-1])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(getattr(self, "lr", 0.1))


class DataModule(data_module.DataModule):
    __doc__ = data_module.DataModule.__doc__

    native = staticmethod(jnp.asarray)


def cross_entropy(y_hat: jax.Array, y: jax.Array) -> jax.Array:
    """Of class scores and class numbers, or a number for each class (one-hot, or smoothed), for each sample."""
    if y.shape == y_hat.shape:
        return optax.losses.softmax_cross_entropy(y_hat, y)
    return optax.losses.softmax_cross_entropy_with_integer_labels(y_hat, y)
