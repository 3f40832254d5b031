"""The book's ``Module``, ``DataModule`` and ``Trainer``, as far as they are the same in every framework."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from manyhands.book.vocabulary import HyperParameters
from manyhands.placement.moves import Placement
from manyhands.training.data.sources import Arrays, as_numpy
from manyhands.training.loss.own_step import default


class Module(HyperParameters):
    """A model that knows its loss and its optimizer. Subclasses give ``net`` (or ``forward``) and ``loss``."""

    loss: Any

    def __init__(self, plot_train_per_epoch: int = 2, plot_valid_per_epoch: int = 1) -> None:
        super().__init__()
        self.plot_train_per_epoch = plot_train_per_epoch
        self.plot_valid_per_epoch = plot_valid_per_epoch

    @default
    def forward(self, *inputs: Any) -> Any:
        net: Any = getattr(self, "net", None)
        if net is None:
            raise AttributeError(f"{type(self).__name__} has neither a `net` nor a `forward` of its own")
        return net(*inputs)

    def output(self, inputs: Any, *, training: bool) -> Any:
        """The model's output in a step."""
        return self(*inputs)  # type: ignore[operator]

    @default
    def training_step(self, batch: Any) -> Any:
        return self.loss(self.output(batch[:-1], training=True), batch[-1])

    @default
    def validation_step(self, batch: Any) -> Any:
        return self.loss(self.output(batch[:-1], training=False), batch[-1])

    @default
    def plot(self, key: str, value: Any, train: bool) -> None:
        """Accepts a value as the book's ``plot`` does.

        The trainer draws: it takes the loss and the accuracy (``"acc"``) that a ``validation_step`` plots.
        """


class DataModule(HyperParameters):
    """Data with a training and a test part. Subclasses give ``get_dataloader``."""

    # What makes the framework's tensors of NumPy's; each framework says it.
    native: Any = staticmethod(np.asarray)

    def __init__(self, root: str = "data", num_workers: int = 4) -> None:
        self.root = root
        self.num_workers = num_workers

    def get_dataloader(self, train: bool) -> Any:
        raise TypeError(f"{type(self).__name__} must say in get_dataloader(train) where its batches come from")

    def train_dataloader(self) -> Any:
        return self.get_dataloader(train=True)

    def val_dataloader(self) -> Any:
        return self.get_dataloader(train=False)

    def get_tensorloader(self, tensors: Any, train: bool, indices: slice = slice(0, None)) -> Any:
        """Batches of those tensors, shuffled for training."""
        rows = tuple(as_numpy(tensor)[indices] for tensor in tensors)
        return Arrays(rows, native=self.native, batch_size=getattr(self, "batch_size", None), shuffle=train)


class BookTrainer(HyperParameters):
    """What the book's trainer has besides: its stored arguments, and its hooks for loops written by hand."""

    backend: ClassVar[Any]
    gpus: list[Any]
    train_source: Any
    test_source: Any

    def _keep(self, arguments: dict[str, Any]) -> None:
        super()._keep(arguments)  # type: ignore[misc]
        self.hparams = dict(arguments)

    def prepare_batch(self, batch: Any) -> Any:
        """The batch on the first of the trainer's devices."""
        place = Placement(self.backend)
        return [place.to_leaf(part, self.gpus[0]) for part in batch] if self.gpus else batch

    def prepare_model(self, model: Any) -> Any:
        """The model on the first of the trainer's devices, knowing its trainer."""
        model.trainer = self
        return Placement(self.backend).to_leaf(model, self.gpus[0]) if self.gpus else model

    def prepare_data(self, data: Any) -> None:
        """Split the user's data into training and validation data."""
        self.train_source, self.test_source = self._sources(data)  # type: ignore[attr-defined]
