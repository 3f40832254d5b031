"""One framework's training, as the contract suite sees it: recipes, virtual CPU devices, and a few real images."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.data import fashion_mnist
from manyhands.training.data.fashion_mnist import FashionMnist, Images

MOST = 3  # devices in a test


@functools.cache
def small_set() -> FashionMnist:
    return fashion_mnist.load(fashion_mnist.SUBSET_DIRECTORY)


@dataclass
class Bench:
    """What a test trains with."""

    framework: str
    mh: Any
    recipes: Any
    folder: Path
    made: int = field(default=0)

    @property
    def words(self) -> Any:
        """A framework's models, losses, optimizers (of a rate), data (of arrays and a batch size), and float64.

        ``data`` says whether a form has the batch size in it; ``without`` are options that the framework does not have.
        """
        return importlib.import_module(f"words_{self.framework}")

    @property
    def own(self) -> Any:
        """What is another word in each framework.

        An ``array`` as its models take it, and their ``scores``; Adam; a ``loss`` that is a mean over samples which
        nobody can look into, and the root of a mean, which is none; its losses that are so many times the mean of
        ``squares``, for ten numbers per sample; a ``metric`` object, the accuracy; ``share_right``, as an array;
        an optimizer with a schedule of its own; a net of vectors with BatchNorm, from four numbers to three scores,
        its ``tensors``, and what ``wrt`` takes for its last layer.
        """
        return self.words.own

    def on(self, count: int) -> dict[str, Any]:
        """The trainer's options for so many devices."""
        return {"devices": f"cpu:{count}"}

    def data(self, samples: int = 64, tested: int = 23, batch_size: int = 16, label: int | None = None) -> Any:
        """Real images. By default all batches are whole: a short one at the end is one more program to compile.

        ``label``: given to the first sample.
        """
        whole = small_set()
        labels = whole.train.labels[:samples].copy()
        if label is not None:
            labels[0] = label
        train = Images(whole.train.images[:samples], labels)
        test = Images(whole.test.images[:tested], whole.test.labels[:tested])
        return self.recipes.data(FashionMnist(train, test, "a test", True), batch_size)

    def fit(self, devices: int = 1, *, model: str = "mlp", epochs: int = 2, data: Any = None, **options: Any) -> Any:
        """Train a built-in model in a run folder; the result."""
        options.setdefault("run", self.new_run())
        options.setdefault("optimizer", self.recipes.nesterov(0.05))
        options.setdefault("precision", "fp32")
        trainer = self.mh.Trainer(epochs, quiet=True, **self.on(devices), **options)
        return trainer.fit(self.recipes.model(model, 0), self.data() if data is None else data)

    def images(self, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Random images in the framework's layout, and their classes."""
        random = np.random.RandomState(0)
        X = random.normal(size=(count, 28, 28)).astype(np.float32)
        return self.in_layout(X), random.randint(0, 10, count)

    def in_layout(self, X: NDArray[Any]) -> NDArray[Any]:
        """Images with an axis for their one channel, where the framework has it."""
        return np.expand_dims(X, 1 if self.framework in ("torch", "mxnet") else -1)

    def with_net(self, module: Any) -> Any:
        """A module of the book's with an MLP in it."""
        module.net = self.recipes.model("mlp", 0)
        return module

    def arrays(self, X: NDArray[Any], y: NDArray[Any]) -> tuple[Any, Any]:
        """A batch as the framework's loaders give it: PyTorch's has tensors."""
        return (self.own.array(X), self.own.array(y)) if self.framework == "torch" else (X, y)

    def new_run(self) -> Path:
        self.made += 1
        return self.folder / f"run{self.made}"

    def weights(self, run: str | Path) -> dict[str, NDArray[Any]]:
        """The model's tensors in a run's last checkpoint, by the framework's own names."""
        return dict(load(store.load(Path(run) / "checkpoints").blobs["model"]))

    def scores(self, model: Any, images: NDArray[np.uint8]) -> NDArray[Any]:
        """The model's class scores for images in bytes, in evaluation mode."""
        labels = np.zeros(len(images), dtype=np.uint8)
        part = Images(images, labels)
        ((X, _),) = self.recipes.data(FashionMnist(part, part, "a test", True), len(images))[1]
        return self.own.scores(model, X)  # type: ignore[no-any-return]


CALL = {"torch": "forward", "jax": "__call__", "tensorflow": "call", "mxnet": "forward"}


def counting(framework: str, model: Any) -> tuple[Any, list[str]]:
    """The model, with a list that grows by one whenever its Python code is called."""
    calls: list[str] = []
    plain, name = type(model), CALL[framework]

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(name)
        return getattr(plain, name)(self, *args, **options)

    object.__setattr__(model, "__class__", type(plain.__name__, (plain,), {name: counted}))
    return model, calls


def run_of(folder: Path, weights: Any, config: Any = None) -> Path:
    """A run of PyTorch's that holds these weights, made without PyTorch."""
    run = RunFolder.at(folder)
    run.config = config or {}
    state: dict[str, Any] = {"cursor": {"epoch": 1, "sample": 0, "batch": 0, "step": 4}, "samples": 64, "shuffle": True}
    state |= {"last_row": 4, "batches_before": None, "seconds_of_row": 0.0, "seconds": 0.0}
    state |= {"settings": {"batch_size": 16, "seed": 0}, "totals": [[0.0, 0.0, 0.0, True, {}]], "shares": None}
    state |= {"framework": "torch", "optimizer_type": None}
    store.save(run.checkpoints, 4, state, {"model": save(dict(weights))})
    return folder
