"""One framework's training, as the contract suite sees it: recipes, virtual CPU devices, and a few real images."""

from __future__ import annotations

import functools
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

    def own_loss(self) -> Any:
        """A mean over samples that nobody can look into."""
        if self.framework == "torch":
            from torch.nn import functional

            return lambda scores, y: functional.cross_entropy(scores, y) * 2
        if self.framework == "jax":
            import optax

            return lambda scores, y: optax.softmax_cross_entropy_with_integer_labels(scores, y).mean() * 2
        if self.framework == "tensorflow":
            import tensorflow

            entropy = tensorflow.nn.sparse_softmax_cross_entropy_with_logits
            return lambda y, scores: tensorflow.reduce_mean(entropy(tensorflow.cast(y, "int32"), scores)) * 2
        from mxnet import gluon

        softmax = gluon.loss.SoftmaxCrossEntropyLoss()
        return lambda scores, y: softmax(scores, y).mean() * 2

    def root_loss(self) -> Any:
        """The root of the mean square of all scores of a batch: no mean over samples."""
        if self.framework == "torch":
            return lambda scores, y: (scores**2).mean().sqrt()
        if self.framework == "jax":
            return lambda scores, y: (scores**2).mean() ** 0.5
        if self.framework == "tensorflow":
            import tensorflow

            return lambda y, scores: tensorflow.sqrt(tensorflow.reduce_mean(scores**2))
        return lambda scores, y: (scores**2).mean().sqrt()

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

    def adam(self) -> Any:
        """The framework's own class, or function, that makes an Adam."""
        if self.framework == "torch":
            import torch

            return torch.optim.Adam
        if self.framework == "jax":
            import optax

            return optax.adam
        if self.framework == "tensorflow":
            import keras

            return keras.optimizers.Adam
        import mxnet as mx

        return mx.optimizer.Adam

    def arrays(self, X: NDArray[Any], y: NDArray[Any]) -> tuple[Any, Any]:
        """A batch as the framework's loaders give it: PyTorch's has tensors."""
        if self.framework != "torch":
            return X, y
        import torch

        return torch.from_numpy(X), torch.from_numpy(y)

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
        return getattr(self, f"_{self.framework}")(model, X)

    def _torch(self, model: Any, X: Any) -> NDArray[Any]:
        import torch

        with torch.no_grad():
            return model.eval()(X).numpy()

    def _jax(self, model: Any, X: Any) -> NDArray[Any]:
        model.eval()
        return np.asarray(model(X))

    def _tensorflow(self, model: Any, X: Any) -> NDArray[Any]:
        return np.asarray(model(X, training=False))

    def _mxnet(self, model: Any, X: Any) -> NDArray[Any]:
        return model(X).asnumpy()


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


def normalising(framework: str) -> Any:
    """A net of vectors with BatchNorm: four numbers in, scores of three classes out."""
    if framework == "torch":
        from torch import nn

        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    if framework == "jax":
        from flax import nnx

        rngs = nnx.Rngs(0)
        return nnx.Sequential(nnx.Linear(4, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs))
    if framework == "tensorflow":
        import keras

        layers = keras.layers
        return keras.Sequential([keras.Input((4,)), layers.Dense(6), layers.BatchNormalization(), layers.Dense(3)])
    from mxnet.gluon import nn as gluon_nn

    net = gluon_nn.HybridSequential()
    net.add(gluon_nn.Dense(6, in_units=4), gluon_nn.BatchNorm(in_channels=6), gluon_nn.Dense(3, in_units=6))
    return net


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


class Stopped(Exception):
    """What a test stops a training with."""


class StopAt:
    """A schedule that leaves the rate alone and raises at the n-th step."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, done: float) -> float:
        self.left -= 1
        if self.left < 0:
            raise Stopped
        return 1.0


def same(done: float) -> float:
    return 1.0
