"""The textbook's classes, models and functions for JAX, and what ``manyhands train`` takes of it.

Models are written with Flax NNX's own layers. Images are 28 by 28 (Fashion-MNIST) unless a docstring says more, with
their channels last: ``(n, 28, 28, 1)``. Weights are Xavier uniform and biases small, both drawn from ``rngs``: a seed
gives the same net on every device. The layers, and the order in which features are flattened, are those of the PyTorch
models, so that weights move between the two (:mod:`.models`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from numpy.typing import NDArray

from manyhands import tree
from manyhands.backends.jax import devices as _backend
from manyhands.book import trainer as _book
from manyhands.book.accuracy import Accuracy, Predictor, check_shapes
from manyhands.book.models import RESNET18, SMALL_RESNET, residual_width
from manyhands.book.trainer import BookTrainer, Plotting, fashion_mnist_arrays, train_fashion_mnist
from manyhands.book.vocabulary import HyperParameters
from manyhands.device import Device
from manyhands.training.checkpoints import tensors
from manyhands.training.commands import recipes
from manyhands.training.commands.parity import Way, nudged
from manyhands.training.data import fashion_mnist
from manyhands.training.data.sources import Arrays
from manyhands.training.jax import linen, world
from manyhands.training.jax import trainer as _trainer
from manyhands.training.jax.objective import cross_entropy
from manyhands.training.jax.skeleton import Skeleton, doubled, evaluating, named, refilled
from manyhands.training.loss.own_step import default
from manyhands.training.options import Step
from manyhands.training.result import Result

# Models


_SEED = 0


class Residual(nnx.Module):  # type: ignore[misc]
    """Two 3x3 convolutions and a way around them: the block of a ResNet.

    ``Residual(64, 128, use_1x1conv=True, strides=2, rngs=nnx.Rngs(0))`` halves the image and doubles the channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        use_1x1conv: bool = False,
        strides: int = 1,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        width = residual_width(in_channels, out_channels, use_1x1conv=use_1x1conv, strides=strides)
        rngs = nnx.Rngs(_SEED) if rngs is None else rngs
        self.conv1 = _convolution(in_channels, width, 3, rngs, strides=strides, padding=1)
        self.conv2 = _convolution(width, width, 3, rngs, padding=1)
        self.conv3 = _convolution(in_channels, width, 1, rngs, strides=strides) if use_1x1conv else None
        self.bn1 = _normalisation(width, rngs)
        self.bn2 = _normalisation(width, rngs)

    def __call__(self, X: jax.Array) -> jax.Array:
        Y = nnx.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        around = X if self.conv3 is None else self.conv3(X)
        return nnx.relu(Y + around)


class _ResNet(nnx.Module):  # type: ignore[misc]
    """The names of its parts are the book's."""

    def __init__(
        self, num_classes: int, in_channels: int, rngs: nnx.Rngs | None, widths: Sequence[int], blocks: int
    ) -> None:
        rngs = nnx.Rngs(_SEED) if rngs is None else rngs
        width = widths[0]
        self.stem = nnx.Sequential(
            _convolution(in_channels, width, 3, rngs, padding=1), _normalisation(width, rngs), nnx.relu
        )
        self.stages = len(widths)
        for number, (before, after) in enumerate(zip((width, *widths), widths, strict=False), start=1):
            changes: dict[str, Any] = {} if number == 1 else {"use_1x1conv": True, "strides": 2}
            first = Residual(before, after, rngs=rngs, **changes)
            rest = [Residual(after, after, rngs=rngs) for _ in range(blocks - 1)]
            setattr(self, f"resnet_block{number}", nnx.Sequential(first, *rest))
        self.fc = nnx.Sequential(flatten, _linear(widths[-1], num_classes, rngs))

    def __call__(self, X: jax.Array) -> jax.Array:
        X = self.stem(X)
        for number in range(1, self.stages + 1):
            X = getattr(self, f"resnet_block{number}")(X)
        return self.fc(X.mean((1, 2), keepdims=True))


def resnet18(num_classes: int = 10, in_channels: int = 1, *, rngs: nnx.Rngs | None = None) -> nnx.Module:
    """ResNet-18 for small images of any size: the first layer keeps their size, and nothing is pooled away."""
    return _ResNet(num_classes, in_channels, rngs, **RESNET18)


def small_resnet(num_classes: int = 10, in_channels: int = 1, *, rngs: nnx.Rngs | None = None) -> nnx.Module:
    """A ResNet with one block a stage, for images of any size: some minutes on two CPU cores."""
    return _ResNet(num_classes, in_channels, rngs, **SMALL_RESNET)


def lenet(num_classes: int = 10, in_channels: int = 1, *, rngs: nnx.Rngs | None = None) -> nnx.Module:
    """LeNet-5 as one would write it today, with ReLU and max pooling: the quickest to a good accuracy on a CPU."""
    rngs = nnx.Rngs(_SEED) if rngs is None else rngs
    return nnx.Sequential(
        _convolution(in_channels, 6, 5, rngs, padding=2),
        nnx.relu,
        _pool,
        _convolution(6, 16, 5, rngs),
        nnx.relu,
        _pool,
        flatten,
        _linear(16 * 5 * 5, 120, rngs),
        nnx.relu,
        _linear(120, 84, rngs),
        nnx.relu,
        _linear(84, num_classes, rngs),
    )


def mlp(num_classes: int = 10, in_channels: int = 1, *, rngs: nnx.Rngs | None = None) -> nnx.Module:
    """One hidden layer of 256: the smallest model that learns something."""
    rngs = nnx.Rngs(_SEED) if rngs is None else rngs
    return nnx.Sequential(
        flatten,
        _linear(in_channels * 28 * 28, 256, rngs),
        nnx.relu,
        _linear(256, num_classes, rngs),
    )


MODELS: dict[str, Callable[..., nnx.Module]] = {
    "resnet18": resnet18,
    "lenet": lenet,
    "small-resnet": small_resnet,
    "mlp": mlp,
}


def flatten(X: jax.Array) -> jax.Array:
    """One row per sample; of images channel after channel, as PyTorch has them in memory."""
    return (jnp.moveaxis(X, -1, 1) if X.ndim > 2 else X).reshape(len(X), -1)


def _pool(X: jax.Array) -> jax.Array:
    return nnx.max_pool(X, window_shape=(2, 2), strides=(2, 2))


def _convolution(
    in_channels: int, out_channels: int, size: int, rngs: nnx.Rngs, *, strides: int = 1, padding: int = 0
) -> nnx.Conv:
    # Padding in numbers: "SAME" would pad another side than PyTorch where a stride leaves a choice.
    return nnx.Conv(
        in_channels,
        out_channels,
        (size, size),
        strides=strides,
        padding=((padding, padding), (padding, padding)),
        kernel_init=_xavier(in_channels * size * size, out_channels * size * size),
        bias_init=_small(in_channels * size * size),
        rngs=rngs,
    )


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, kernel_init=_xavier(inputs, outputs), bias_init=_small(inputs), rngs=rngs)


def _normalisation(width: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    return nnx.BatchNorm(width, momentum=0.9, epsilon=1e-5, rngs=rngs)


def _xavier(inputs: int, outputs: int) -> Callable[..., jax.Array]:
    return _uniform(math.sqrt(6 / (inputs + outputs)))


def _small(inputs: int) -> Callable[..., jax.Array]:
    """PyTorch's own rule for biases: up to one by the root of the number of inputs."""
    return _uniform(1 / math.sqrt(inputs))


def _uniform(bound: float) -> Callable[..., jax.Array]:
    """Numbers between plus and minus the bound, drawn on the host: JAX would compile a program for every shape.

    (For ResNet-18 these take 15 seconds, the numbers of NumPy's generator none.)
    """

    def draw(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
        def drawn(bits: Any) -> NDArray[Any]:
            number = int.from_bytes(np.asarray(bits).tobytes(), "little")
            raw = np.random.Philox(key=number).random_raw(math.prod(shape))
            return ((raw >> np.uint64(11)) / 2**52 * bound - bound).reshape(shape).astype(dtype)

        bits = jax.random.key_data(key)
        if isinstance(bits, jax.core.Tracer):  # inside jit or nnx.eval_shape
            return jax.pure_callback(drawn, jax.ShapeDtypeStruct(shape, dtype), bits)
        return jnp.asarray(drawn(bits))

    return draw


# Module and DataModule


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

    @default
    def loss(self, y_hat: Any, y: Any) -> jax.Array:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return cross_entropy(y_hat, y).mean()

    def __call__(self, *inputs: Any) -> Any:
        if not hasattr(self, "net"):
            raise AttributeError(f"{type(self).__name__} has neither a `net` nor a `__call__` of its own")
        return self.net(*inputs)

    @default
    def training_step(self, batch: Any) -> jax.Array:
        return self.loss(self(*batch[:-1]), batch[-1])

    @default
    def validation_step(self, batch: Any) -> jax.Array:
        return self.loss(self(*batch[:-1]), batch[-1])

    @default
    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(getattr(self, "lr", 0.1))


class DataModule(_book.DataModule):
    __doc__ = _book.DataModule.__doc__

    native = staticmethod(jnp.asarray)


# Fashion-MNIST


def load_data_fashion_mnist(batch_size: int, path: str | Path | None = None) -> tuple[Arrays, Arrays]:
    """The training and the test set, as loaders of batches (images of shape (n, 28, 28, 1) from 0 to 1, labels)."""
    return data(fashion_mnist.load(path), batch_size)


def data(data: fashion_mnist.FashionMnist, batch_size: int | None) -> tuple[Arrays, Arrays]:
    return fashion_mnist_arrays(data, scale_images, jnp.asarray, batch_size)


def scale_images(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bytes to numbers from 0 to 1, with an axis for the one channel, which comes last."""
    images, labels = batch
    return (images.astype(jnp.float32) / 255)[..., None], labels.astype(jnp.int32)


# Accuracy


class _Accuracy(Accuracy[jax.Device]):
    models = (nnx.Module,)
    model_name = "flax.nnx.Module"

    def count(self, y_hat: jax.Array, y: jax.Array) -> jax.Array:
        classes = y_hat.argmax(1) if y_hat.ndim > 1 and y_hat.shape[1] > 1 else y_hat
        check_shapes(y_hat, classes, y)
        return (classes.reshape(y.shape).astype(y.dtype) == y).sum()

    def native(self, leaf: Any) -> jax.Array:
        return jnp.asarray(leaf)

    def homes(self, net: Any) -> list[jax.Device]:
        tensors = [tensor for _, tensor in _backend.model_tensors(net)] if isinstance(net, nnx.Module) else []
        return list(dict.fromkeys(device for tensor in tensors for device in tensor.devices()))

    def destination(self, net: Any, device: jax.Device | Device | str | None) -> jax.Device | None:
        """Samples of a net that is sharded over several devices stay where they are."""
        return None if device is None and len(self.homes(net)) > 1 else super().destination(net, device)

    @contextlib.contextmanager
    def predicting(
        self, net: Any, devices: Sequence[jax.Device | None], *, replicate: bool
    ) -> Iterator[Sequence[Predictor]]:
        yield [_compiled(net, device if replicate else None) for device in devices]


def _compiled(net: Any, device: jax.Device | None) -> Predictor:
    """What the net answers: of a module a compiled function in evaluation mode, with its numbers on that device."""
    if not isinstance(net, nnx.Module):
        return net  # type: ignore[no-any-return]
    graph, state = nnx.split(net)
    if device is not None:
        state = jax.device_put(state, device)
    compiled = jax.jit(lambda state, X: evaluating(nnx.merge(graph, state))(X))
    return functools.partial(compiled, state)


_functions = _Accuracy(_backend)
accuracy = _functions.accuracy
evaluate_accuracy_gpu = _functions.evaluate_accuracy_gpu
evaluate_accuracy_gpus = _functions.evaluate_accuracy_gpus


# The trainer


class Trainer(BookTrainer, _trainer.Trainer):
    __doc__ = _trainer.Trainer.__doc__

    def prepare_batch(self, batch: Any) -> Any:
        """The batch as JAX's arrays, on the first of the trainer's devices."""
        return super().prepare_batch([tree.map_leaves(jnp.asarray, part) for part in batch])


def train(net: nnx.Module, num_gpus: int, batch_size: int, lr: float, num_epochs: int = 10) -> Result:
    """The book's ``train``: Fashion-MNIST, plain SGD; prints the book's last line."""
    return train_fashion_mnist(Trainer, load_data_fashion_mnist, net, num_gpus, batch_size, lr, num_epochs)


# The command: see :class:`manyhands.training.commands.recipes.Recipes`


def model(name: str, seed: int) -> nnx.Module:
    return MODELS[name](num_classes=10, rngs=nnx.Rngs(seed))


def nesterov(rate: float) -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.9, nesterov=True))


arrays = recipes.arrays


def from_first(make: Callable[[], Any]) -> Any:
    world.check()
    first_value = json.dumps(make()).encode() if jax.process_index() == 0 else b""
    return json.loads(world.from_first(first_value))


def trained(model: nnx.Module, data: Arrays, way: Way, loss: Any = None) -> dict[str, NDArray[Any]]:
    part = replace(data.spread(way.samples), batch_size=way.batch_size)
    options: dict[str, Any] = {"step": Step(shares=way.shares), "precision": way.precision, "loss": loss}
    double = way.precision == "fp64"
    with jax.enable_x64(True) if double else contextlib.nullcontext():
        net = copy.deepcopy(model)
        if double:
            doubled(net)
        skeleton = Skeleton(net)
        skeleton.put_into(net, jax.tree.map(lambda leaf: jnp.asarray(nudged(leaf, way.nudge)), skeleton.numbers(net)))
        # An optimizer with a memory, so that differences of early steps would show.
        trainer = Trainer(
            way.epochs, optimizer=optax.sgd(0.02, momentum=0.9), quiet=True, devices=f"cpu:{way.devices}", **options
        )
        trainer.fit(net, part)
        return {name: np.array(tensor) for name, tensor in _tensors(net).items()}


def layers(model: nnx.Module) -> list[Any]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]


def load_model(run: str | Path) -> nnx.Module:
    """The model that ``manyhands train`` has trained in a run, in evaluation mode."""
    name, weights = recipes.model_and_weights(run, "jax")
    net = model(name, 0)
    _restore(net, weights)
    net.eval()
    return net


def load_weights(model: Any, run: str | Path) -> Any:
    """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

    The model is in evaluation mode then. If the run averaged its weights (``mh.EMA``), these are the average. A Linen
    module has to be bound to variables, ``module.bind(module.init(key, X[:1]))``; one that is bound to the weights is
    returned.
    """
    if linen.is_linen(model):
        wrapped = linen.with_weights(model)
        _restore(wrapped, recipes.weights_of(run, "jax"))
        return linen.as_linen(wrapped, model.variables)
    _restore(model, recipes.weights_of(run, "jax"))
    model.eval()
    return model


def _restore(net: nnx.Module, weights: bytes) -> None:
    skeleton = Skeleton(net)
    saved = tensors.fitting(weights, _tensors(net), "weights of another model")
    before = skeleton.numbers(net)
    after = {part: refilled(before[part], saved) for part in ("parameters", "rest")}
    skeleton.put_into(net, {**before, **jax.tree.map(jnp.asarray, after)})


def _tensors(net: nnx.Module) -> dict[str, Any]:
    numbers = Skeleton(net).numbers(net)
    return {**named(numbers["parameters"]), **named(numbers["rest"])}
