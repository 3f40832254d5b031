"""The book's ``Module``, ``DataModule``, ``Trainer`` and functions, as far as they are the same in every framework."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from manyhands.book import recipes
from manyhands.book.recipes import Recipes, Way, nudged
from manyhands.book.vocabulary import HyperParameters
from manyhands.placement.moves import Placement
from manyhands.training.checkpoints import tensors
from manyhands.training.data import fashion_mnist
from manyhands.training.data.fashion_mnist import FashionMnist, Images
from manyhands.training.data.sources import Arrays, as_numpy
from manyhands.training.loss.own_step import default
from manyhands.training.options import Step
from manyhands.training.result import Result


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


class Book(Recipes):
    """The functions of the book and of the command, of one framework."""

    framework: ClassVar[str]
    trainer: ClassVar[Callable[..., Any]]
    native: Any = staticmethod(np.asarray)
    batch_stats: ClassVar[Literal["global"] | None] = "global"  # of a training that is compared with another one

    # Implemented by each framework

    @abc.abstractmethod
    def scale_images(self, batch: Any) -> Any:
        """Bytes of grey images to numbers from 0 to 1 with a channel axis: done on the device, after the gather."""

    @abc.abstractmethod
    def momentum(self) -> Any:
        """An optimizer with a memory, so that differences of early steps show: SGD with momentum 0.9 and rate 0.02."""

    @abc.abstractmethod
    def tensors(self, model: Any) -> Mapping[str, Any]:
        """All that a model holds by name, as NumPy's arrays."""

    @abc.abstractmethod
    def restore(self, model: Any, weights: bytes) -> None:
        """Put weights into a model; those of another model are refused."""

    @abc.abstractmethod
    def copied(self, model: Any, way: Way, data: Any) -> AbstractContextManager[Any]:
        """A copy of the model in that way's precision; or the model itself, which has its values again afterwards."""

    def evaluating(self, model: Any) -> Any:
        """The model in evaluation mode."""
        return model

    def from_first(self, make: Callable[[], Any]) -> Any:
        return make()

    def source(self, part: Images, batch_size: int | None, *, shuffle: bool) -> Any:
        """A part of Fashion-MNIST, as ``Trainer.fit`` takes it."""
        return Arrays((part.images, part.labels), self.scale_images, self.native, batch_size, shuffle)

    def arrays(self, data: Any) -> Any:
        return recipes.arrays(data)

    # The book's functions

    def data(self, data: FashionMnist, batch_size: int | None) -> tuple[Any, Any]:
        return self.source(data.train, batch_size, shuffle=True), self.source(data.test, batch_size, shuffle=False)

    def load_data_fashion_mnist(self, batch_size: int, path: str | Path | None = None) -> tuple[Any, Any]:
        """The training and the test set, as loaders of batches (images with numbers from 0 to 1, labels)."""
        return self.data(fashion_mnist.load(path), batch_size)

    def train(self, net: Any, num_gpus: int, batch_size: int, lr: float, num_epochs: int = 10) -> Result:
        """The book's ``train``: Fashion-MNIST, plain SGD; prints the book's last line."""
        trainer = self.trainer(num_epochs, num_gpus, batch_size=batch_size, lr=lr)
        result: Result = trainer.fit(net, self.load_data_fashion_mnist(batch_size))
        print(result)
        return result

    def trained(self, model: Any, data: Any, way: Way, loss: Any = None) -> Mapping[str, Any]:
        options: dict[str, Any] = {
            "step": Step(shares=way.shares, batch_stats=self.batch_stats),
            "precision": way.precision,
        }
        options |= {"devices": f"cpu:{way.devices}", "loss": loss, "quiet": True}
        part = dataclasses.replace(data.spread(way.samples), batch_size=way.batch_size)
        with self.copied(model, way, data) as net:
            if way.nudge is not None:
                nudges = {name: nudged(values, way.nudge) for name, values in self.tensors(net).items()}
                self.restore(net, tensors.pack(nudges))
            self.trainer(way.epochs, optimizer=self.momentum(), **options).fit(net, part)
            return self.tensors(net)

    def load_model(self, run: str | Path) -> Any:
        """The model that ``manyhands train`` has trained in a run, on the CPU and in evaluation mode."""
        name, weights = recipes.model_and_weights(run, self.framework)
        net = self.model(name, 0)
        self.restore(net, weights)
        return self.evaluating(net)

    def load_weights(self, model: Any, run: str | Path) -> Any:
        """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

        The model is in evaluation mode then, where models have one. If the run averaged its weights (``mh.EMA``), these
        are the average.
        """
        self.restore(model, recipes.weights_of(run, self.framework))
        return self.evaluating(model)
