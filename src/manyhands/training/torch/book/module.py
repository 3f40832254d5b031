"""The book's ``Module`` and ``DataModule``: what a user subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from manyhands.training.book import data_module
from manyhands.training.book.plots import Plotting
from manyhands.training.book.vocabulary import HyperParameters
from manyhands.training.torch.data.sources import Arrays


class Module(torch.nn.Module, HyperParameters, Plotting):
    """A model that knows its loss and its optimizer. Subclasses give ``net`` (or ``forward``) and ``loss``."""

    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        super().__init__()
        self.plot_train_per_epoch = plot_train_per_epoch
        self.plot_valid_per_epoch = plot_valid_per_epoch

    def loss(self, y_hat: Any, y: Any) -> torch.Tensor:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return torch.nn.functional.cross_entropy(y_hat, y)

    def forward(self, *inputs: Any) -> Any:
        if not hasattr(self, "net"):
            raise AttributeError(f"{type(self).__name__} has neither a `net` nor a `forward` of its own")
        net: Any = self.net
        return net(*inputs)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.loss(self(*batch[:-1]), batch[-1])

    def validation_step(self, batch: Any) -> torch.Tensor:
        return self.loss(self(*batch[:-1]), batch[-1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=getattr(self, "lr", 0.1))

    def apply_init(self, inputs: Any, init: Callable[[torch.nn.Module], None] | None = None) -> None:
        """Run lazy layers once, so that their parameters exist; then initialise."""
        self(*inputs)
        if init is not None:
            self.apply(init)


class DataModule(data_module.DataModule):
    __doc__ = data_module.DataModule.__doc__

    def get_tensorloader(self, tensors: Any, train: bool, indices: slice = slice(0, None)) -> Arrays:
        """Batches of those tensors, shuffled for training."""
        return Arrays(tuple(t[indices] for t in tensors), None, getattr(self, "batch_size", None), shuffle=train)
