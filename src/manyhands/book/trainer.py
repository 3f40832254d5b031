"""The book's ``DataModule``, ``Trainer`` and ``train``, as far as they are the same in every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from manyhands.book.vocabulary import HyperParameters
from manyhands.placement.moves import Placement
from manyhands.training.data.fashion_mnist import FashionMnist, Images
from manyhands.training.data.sources import Arrays, Batch, as_numpy
from manyhands.training.loss.own_step import default
from manyhands.training.result import Result


class Plotting:
    """``plot`` of the book's ``Module``."""

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


def train_fashion_mnist(
    trainer: Callable[..., Any],
    load: Callable[[int], tuple[Any, Any]],
    net: Any,
    num_gpus: int,
    batch_size: int,
    lr: float,
    num_epochs: int,
) -> Result:
    """The book's ``train``: Fashion-MNIST, plain SGD; prints the book's last line."""
    result: Result = trainer(num_epochs, num_gpus, batch_size=batch_size, lr=lr).fit(net, load(batch_size))
    print(result)
    return result


def fashion_mnist_arrays(
    data: FashionMnist, prepare: Callable[[Batch], Batch], native: Callable[[Any], Any], batch_size: int | None
) -> tuple[Arrays, Arrays]:
    """The training part, shuffled, and the test part; ``prepare`` and ``native`` as in :class:`Arrays`."""

    def arrays(part: Images, *, shuffle: bool) -> Arrays:
        return Arrays((part.images, part.labels), prepare, native, batch_size, shuffle)

    return arrays(data.train, shuffle=True), arrays(data.test, shuffle=False)
