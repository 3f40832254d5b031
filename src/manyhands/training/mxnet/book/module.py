"""The book's ``Module`` and ``DataModule``: what a user subclasses."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet import autograd, gluon

from manyhands.training.book import data_module
from manyhands.training.book.plots import Plotting
from manyhands.training.book.vocabulary import HyperParameters
from manyhands.training.mxnet import modes


class Module(gluon.Block, HyperParameters, Plotting):  # type: ignore[misc]
    """A model that knows its loss and its optimizer. Subclasses give ``net`` (or ``forward``) and ``loss``."""

    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        super().__init__()
        self.plot_train_per_epoch = plot_train_per_epoch
        self.plot_valid_per_epoch = plot_valid_per_epoch

    def loss(self, y_hat: Any, y: Any) -> Any:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return gluon.loss.SoftmaxCrossEntropyLoss()(y_hat, y).mean()

    def forward(self, *inputs: Any) -> Any:
        if not hasattr(self, "net"):
            raise AttributeError(f"{type(self).__name__} has neither a `net` nor a `forward` of its own")
        return self.net(*inputs)

    def training_step(self, batch: Any) -> Any:
        return self.loss(self(*batch[:-1]), batch[-1])

    def validation_step(self, batch: Any) -> Any:
        return self.loss(self(*batch[:-1]), batch[-1])

    def configure_optimizers(self) -> gluon.Trainer:
        return gluon.Trainer(self.collect_params(), "sgd", {"learning_rate": getattr(self, "lr", 0.1)})

    def apply_init(self, inputs: Any, init: mx.init.Initializer | None = None) -> None:
        """Draw the parameters, and run the model once, so that those of every layer exist."""
        self.initialize(init or mx.init.Xavier(), force_reinit=True)
        self(*inputs)

    def set_scratch_params_device(self, device: mx.Context) -> None:
        """Move arrays that stand in the model as plain attributes: parameters of layers written from scratch.

        Those of modules inside it, also in lists, go with them. Each has a gradient afterwards.
        """
        for name, value in list(vars(self).items()):
            if isinstance(value, mx.nd.NDArray):
                with autograd.pause():
                    moved = value.as_in_context(device).detach()
                moved.attach_grad()
                setattr(self, name, moved)
            for part in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(part, Module):
                    part.set_scratch_params_device(device)


class DataModule(data_module.DataModule):
    __doc__ = data_module.DataModule.__doc__
    native = staticmethod(modes.native)
