"""The book's classes and functions, and what the command needs of a framework to train, in any framework."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np

from manyhands import tree
from manyhands.book.vocabulary import HyperParameters
from manyhands.errors import BadBatch, BadRunFolder, SeveralDevices, WrongCheckpoint
from manyhands.placement import moves
from manyhands.placement.moves import Placement
from manyhands.placement.verbs import Verbs
from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.data import fashion_mnist
from manyhands.training.data.fashion_mnist import FashionMnist, Images
from manyhands.training.data.sources import Arrays, as_numpy
from manyhands.training.loss.own_step import default
from manyhands.training.result import Result

Predictor = Callable[[Any], Any]
Split = Callable[[Any, Any, Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]
MODELS = ("resnet18", "lenet", "small-resnet", "mlp")


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


class Recipes:
    """What the book and the command call of one framework: ``manyhands.book.<framework>.BOOK``."""

    framework: ClassVar[str]
    backend: Any  # the adapter for tensors and devices
    trainer: ClassVar[Any]
    batch_stats: ClassVar[Literal["global"] | None] = "global"  # of a training that is compared with another one

    # Each framework has its own

    # Bytes of grey images to numbers from 0 to 1 with a channel axis: done on the device, after the gather.
    scale_images: Callable[[Any], Any]
    # One of MODELS for images of 28 by 28 and ten classes, with weights drawn by the seed.
    model: Callable[[str, int], Any]
    # SGD with Nesterov's momentum 0.9 and weight decay 5e-4, as Trainer(optimizer=...) takes it.
    nesterov: Callable[[float], Any]
    # All that a model holds by name, as NumPy's arrays; and the way back, which refuses those of another model.
    tensors: Callable[[Any], Mapping[str, Any]]
    restore: Callable[[Any, bytes], None]
    # Within it the model that a function returns, for these data, with all its weights, in float64.
    in_float64: Callable[[Callable[[], Any], Any], AbstractContextManager[Any]]
    # The value (JSON) that a function returns in the first process of a launched job; every process gets it.
    from_first: Callable[[Callable[[], Any]], Any]
    # The number of right predictions, left on the device.
    count: Callable[[Any, Any], Any]
    # The net in evaluation mode, as a function on each of these devices; on None as it is.
    predictors: Callable[[Any, Sequence[Any]], AbstractContextManager[Sequence[Predictor]]]
    # An array of the user's or of NumPy as the framework's.
    native: Callable[[Any], Any]

    def source(self, part: Images, batch_size: int | None, *, shuffle: bool) -> Any:
        """A part of Fashion-MNIST, as ``Trainer.fit`` takes it."""
        return Arrays((part.images, part.labels), self.scale_images, self.native, batch_size, shuffle)

    def home(self, net: Any) -> Any:
        """The device of the net; None for a plain function, and for a net that is sharded over several devices."""
        tensors = self.backend.model_tensors(net) if self.backend.is_model(net) else ()
        try:
            return next((self.backend.device_of(tensor) for _, tensor in tensors), None)
        except SeveralDevices:
            return None

    # The book's functions

    def data(self, data: FashionMnist, batch_size: int | None) -> tuple[Any, Any]:
        """The training and the test part, as ``Trainer.fit`` takes them."""
        return self.source(data.train, batch_size, shuffle=True), self.source(data.test, batch_size, shuffle=False)

    def load_data_fashion_mnist(self, batch_size: int, path: str | Path | None = None) -> tuple[Any, Any]:
        """The training and the test set, as loaders of batches (images with numbers from 0 to 1, labels)."""
        return self.data(fashion_mnist.load(path), batch_size)

    def split_batch(self, X: Any, y: Any, devices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The shards of ``X`` and those of ``y``, one for each device."""
        pairs = Verbs(self.backend).split((X, y), devices)
        return [x for x, _ in pairs], [y for _, y in pairs]

    def train(self, net: Any, num_gpus: int, batch_size: int, lr: float, num_epochs: int = 10) -> Result:
        """The book's ``train``: Fashion-MNIST, plain SGD; prints the book's last line."""
        trainer = self.trainer(num_epochs, num_gpus, batch_size=batch_size, lr=lr)
        result: Result = trainer.fit(net, self.load_data_fashion_mnist(batch_size))
        print(result)
        return result

    def load_model(self, run: str | Path) -> Any:
        """The model that ``manyhands train`` has trained in a run, on the CPU and in evaluation mode."""
        return self.load_weights(self.model(model_name(run), 0), run)

    def load_weights(self, model: Any, run: str | Path) -> Any:
        """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

        The model is in evaluation mode then, where models have one. If the run averaged its weights (``mh.EMA``), these
        are the average.
        """
        self.restore(model, weights_of(run, self.framework))
        if hasattr(model, "eval"):
            model.eval()
        return model

    # Accuracy: predictions are counted on the device, and the counts are read at the end, so that the program never
    # waits for a device between two batches. Every sample counts once, whatever the batch sizes.

    def accuracy(self, y_hat: Any, y: Any) -> float:
        """The number of predictions that are right.

        ``y_hat`` holds a score per class (classes in dimension 1), or the class numbers themselves.
        Reading the number waits for the device.
        """
        return float(self.count(self.native(y_hat), self.native(y)))

    def evaluate_accuracy_gpu(self, net: Predictor, data_iter: Iterable[tuple[Any, Any]], device: Any = None) -> float:
        """The fraction of all samples that the net gets right, on one device (by default where the net is)."""
        here = self.home(net) if device is None else Placement(self.backend).find(device)
        return self._evaluate(net, data_iter, [here], _whole if here is None else self.split_batch)

    def evaluate_accuracy_gpus(
        self, net: Predictor, data_iter: Iterable[tuple[Any, Any]], split_f: Split | None = None
    ) -> float:
        """The fraction of all samples that the net gets right, on all GPUs (or virtual devices, or the CPU).

        Each batch is split over the devices, by ``split_f(X, y, devices)`` if it is given: it returns the shards of
        ``X`` and those of ``y``. The net is not moved: the devices work on copies.
        """
        devices = [self.backend.gpu(i) for i in range(self.backend.num_gpus())] or [self.backend.cpu()]
        return self._evaluate(net, data_iter, devices, split_f or self.split_batch)

    def _evaluate(
        self, net: Predictor, batches: Iterable[tuple[Any, Any]], devices: Sequence[Any], split: Split
    ) -> float:
        samples, counts = 0, []
        with self.predictors(net, devices) as predictors:
            for X, y in batches:
                shards = split(tree.map_leaves(self.native, X), self.native(y), devices)
                for predictor, X_shard, y_shard in zip(predictors, *shards, strict=True):
                    labels = math.prod(y_shard.shape)
                    if labels:  # more devices than samples leave some without
                        counts.append(self.count(predictor(X_shard), y_shard))
                        samples += labels
            if not samples:
                raise BadBatch("there was no sample to evaluate on: was the iterator used up before?")
            return float(sum(map(float, counts))) / samples


def _whole(X: Any, y: Any, devices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return [X], [y]


def of(framework: str) -> Recipes:
    """The recipes of a framework. Importing them imports the framework."""
    moves.require(framework)
    module: Any = importlib.import_module(f"manyhands.book.{framework}")
    return cast(Recipes, module.BOOK)


def model_name(run: str | Path) -> str:
    """The name of the model that ``manyhands train`` trained in a run."""
    name: str | None = RunFolder.open(Path(run).expanduser()).config.get("train", {}).get("model")
    if name not in MODELS:
        raise BadRunFolder(
            f"{run} holds the weights of a model of your own, and not the model itself: make it, and write "
            f"mh.load_weights(model, {str(run)!r})"
        )
    return name


def weights_of(run: str | Path, framework: str) -> bytes:
    """The weights in a run's last checkpoint, or in the one checkpoint that is named; their average if it is kept."""
    path = Path(run).expanduser()
    if not path.is_dir():
        raise BadRunFolder(f"there is no run in {run}: no such folder")
    checkpoint = store.load(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    made_by = checkpoint.state.get("framework", "torch")
    if made_by != framework:
        raise WrongCheckpoint(
            f"the weights in {run} are {made_by}'s: make a run for {framework} of it with "
            f"manyhands convert {run} --to {framework}"
        )
    return checkpoint.blobs.get("average", checkpoint.blobs["model"])
