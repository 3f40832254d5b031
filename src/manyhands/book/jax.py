"""The textbook's classes, models and functions for JAX, written with Flax NNX's own layers.

Images have their channels last: ``(n, 28, 28, 1)``. Weights are Xavier uniform and biases small, both drawn from
``rngs``: a seed gives the same net on every device. The layers, and the order in which features are flattened, are
those of the PyTorch models, so that weights move between the two (:mod:`.models`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from manyhands.book import recipes
from manyhands.book import trainer as _book
from manyhands.book.accuracy import Accuracy, Predictor, check_shapes
from manyhands.book.models import Layers, Models, Size, residual_width
from manyhands.book.recipes import Recipes, Way
from manyhands.device import Device
from manyhands.training.checkpoints import tensors
from manyhands.training.jax import linen, world
from manyhands.training.jax import trainer as _trainer
from manyhands.training.jax.objective import cross_entropy
from manyhands.training.jax.skeleton import Skeleton, doubled, evaluating, named, refilled
from manyhands.training.loss.own_step import default

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
        self.conv1 = _convolution(in_channels, width, 3, strides, 1, rngs=rngs)
        self.conv2 = _convolution(width, width, 3, padding=1, rngs=rngs)
        self.conv3 = _convolution(in_channels, width, 1, strides, rngs=rngs) if use_1x1conv else None
        self.bn1 = _normalisation(width, rngs)
        self.bn2 = _normalisation(width, rngs)

    def __call__(self, X: jax.Array) -> jax.Array:
        Y = nnx.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        around = X if self.conv3 is None else self.conv3(X)
        return nnx.relu(Y + around)


class _ResNet(nnx.Module):  # type: ignore[misc]
    """A chain: layers with numbers for names are its stem, the others have their names."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self.stem = nnx.Sequential(*(layer for name, layer in layers.items() if name.isdecimal()))
        self.order = tuple(name for name in layers if not name.isdecimal())
        for name in self.order:
            setattr(self, name, nnx.Sequential(*layers[name]) if isinstance(layers[name], list) else layers[name])

    def __call__(self, X: jax.Array) -> jax.Array:
        X = self.stem(X)
        for name in self.order:
            X = getattr(self, name)(X)
        return X


def _chain(layers: Mapping[str, Any], size: Size) -> nnx.Module:
    return nnx.Sequential(*layers.values()) if all(map(str.isdecimal, layers)) else _ResNet(layers)


def _models(rngs: nnx.Rngs | None) -> Models[nnx.Module]:
    """The models, whose weights are drawn from ``rngs``."""
    rngs = nnx.Rngs(_SEED) if rngs is None else rngs
    return Models(
        Layers(
            convolution=functools.partial(_convolution, rngs=rngs),
            linear=functools.partial(_linear, rngs=rngs),
            norm=functools.partial(_normalisation, rngs=rngs),
            residual=functools.partial(Residual, rngs=rngs),
            relu=lambda: nnx.relu,
            pool=lambda: _pool,
            average=lambda: _average,
            flatten=lambda: flatten,
            chain=_chain,
        )
    )


def _drawn_from(name: str) -> Callable[..., nnx.Module]:
    def model(num_classes: int = 10, in_channels: int = 1, *, rngs: nnx.Rngs | None = None) -> nnx.Module:
        net: nnx.Module = getattr(_models(rngs), name)(num_classes, in_channels)
        return net

    model.__name__ = model.__qualname__ = name
    model.__doc__ = getattr(Models, name).__doc__
    return model


resnet18, small_resnet, lenet, mlp = map(_drawn_from, ("resnet18", "small_resnet", "lenet", "mlp"))
MODELS = {"resnet18": resnet18, "lenet": lenet, "small-resnet": small_resnet, "mlp": mlp}


def flatten(X: jax.Array) -> jax.Array:
    """One row per sample; of images channel after channel, as PyTorch has them in memory."""
    return (jnp.moveaxis(X, -1, 1) if X.ndim > 2 else X).reshape(len(X), -1)


def _pool(X: jax.Array) -> jax.Array:
    return nnx.max_pool(X, window_shape=(2, 2), strides=(2, 2))


def _average(X: jax.Array) -> jax.Array:
    return X.mean((1, 2), keepdims=True)


def _convolution(
    in_channels: int, out_channels: int, size: int, strides: int = 1, padding: int = 0, *, rngs: nnx.Rngs
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


def _linear(inputs: int, outputs: int, *, rngs: nnx.Rngs) -> nnx.Linear:
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


class Module(_book.Module, nnx.Module):  # type: ignore[misc]
    __doc__ = _book.Module.__doc__
    _kept_in = _Kept

    @default
    def loss(self, y_hat: Any, y: Any) -> jax.Array:
        """The mean loss over the samples; cross-entropy of class scores where a subclass says nothing else."""
        return cross_entropy(y_hat, y).mean()

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)

    @default
    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(getattr(self, "lr", 0.1))


class DataModule(_book.DataModule):
    __doc__ = _book.DataModule.__doc__
    native = staticmethod(jnp.asarray)


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


# The trainer, and the functions of the book and of the command


class Trainer(_book.BookTrainer, _trainer.Trainer):
    __doc__ = _trainer.Trainer.__doc__

    def prepare_batch(self, batch: Any) -> Any:
        """The batch as JAX's arrays, on the first of the trainer's devices."""
        return super().prepare_batch([tree.map_leaves(jnp.asarray, part) for part in batch])


class _Recipes(Recipes):
    framework = "jax"
    trainer = Trainer
    native = staticmethod(jnp.asarray)

    def scale_images(self, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        images, labels = batch
        return (images.astype(jnp.float32) / 255)[..., None], labels.astype(jnp.int32)

    def from_first(self, make: Callable[[], Any]) -> Any:
        world.check()
        first_value = json.dumps(make()).encode() if jax.process_index() == 0 else b""
        return json.loads(world.from_first(first_value))

    def model(self, name: str, seed: int) -> nnx.Module:
        return MODELS[name](num_classes=10, rngs=nnx.Rngs(seed))

    def nesterov(self, rate: float) -> optax.GradientTransformation:
        return optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.9, nesterov=True))

    def momentum(self) -> optax.GradientTransformation:
        return optax.sgd(0.02, momentum=0.9)

    def layers(self, model: nnx.Module) -> list[Any]:
        return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]

    def tensors(self, model: nnx.Module) -> dict[str, Any]:
        numbers = Skeleton(model).numbers(model)
        return {name: np.array(leaf) for part in ("parameters", "rest") for name, leaf in named(numbers[part]).items()}

    def restore(self, model: nnx.Module, weights: bytes) -> None:
        saved = tensors.fitting(weights, self.tensors(model), "weights of another model")
        skeleton = Skeleton(model)
        before = skeleton.numbers(model)
        after = {part: refilled(before[part], saved) for part in ("parameters", "rest")}
        skeleton.put_into(model, {**before, **jax.tree.map(jnp.asarray, after)})

    @contextlib.contextmanager
    def copied(self, model: nnx.Module, way: Way, data: Any) -> Iterator[nnx.Module]:
        double = way.precision == "fp64"
        with jax.enable_x64(True) if double else contextlib.nullcontext():
            net = copy.deepcopy(model)
            if double:
                doubled(net)
            yield net

    def evaluating(self, model: nnx.Module) -> nnx.Module:
        model.eval()
        return model

    def load_weights(self, model: Any, run: str | Path) -> Any:
        """Load the weights of a run's last checkpoint, or of one checkpoint, into the model, and return it.

        The model is in evaluation mode then. If the run averaged its weights (``mh.EMA``), these are the average. A
        Linen module has to be bound to variables, ``module.bind(module.init(key, X[:1]))``; one that is bound to the
        weights is returned.
        """
        if not linen.is_linen(model):
            return super().load_weights(model, run)
        wrapped = linen.with_weights(model)
        self.restore(wrapped, recipes.weights_of(run, "jax"))
        return linen.as_linen(wrapped, model.variables)


BOOK = _Recipes()
train, load_data_fashion_mnist = BOOK.train, BOOK.load_data_fashion_mnist
load_model, load_weights = BOOK.load_model, BOOK.load_weights
