"""The textbook's classes, models and functions for JAX, written with Flax NNX's own layers.

Images have their channels last: ``(n, 28, 28, 1)``. Weights are Xavier uniform and biases small, both drawn from
``rngs``: a seed gives the same net on every device. The layers, and the order in which features are flattened, are
those of the PyTorch models, so that weights move between the two (:mod:`.models`).
"""

from __future__ import annotations

import contextlib
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

from manyhands import tree
from manyhands.backends.jax import devices as _backend
from manyhands.book import NAMES, models, recipes
from manyhands.book.recipes import Predictor, Recipes
from manyhands.book.vocabulary import *  # noqa: F403
from manyhands.training.checkpoints import tensors
from manyhands.training.jax import checks, linen, world
from manyhands.training.jax import trainer as _trainer
from manyhands.training.jax.objective import cross_entropy
from manyhands.training.jax.skeleton import Skeleton, by_name, for_evaluation, refill, to_double
from manyhands.training.loss.own_step import default

# Models


class Residual(models.Residual, nnx.Module):  # type: ignore[misc]
    __doc__ = models.Residual.__doc__
    relu = staticmethod(nnx.relu)

    def __init__(
        self, *channels: int, use_1x1conv: bool = False, strides: int = 1, rngs: nnx.Rngs | None = None
    ) -> None:
        drawn = {"rngs": nnx.Rngs(0) if rngs is None else rngs}
        convolution, norm = functools.partial(_convolution, **drawn), functools.partial(_normalisation, **drawn)
        self._build(convolution, norm, channels[0], channels[-1], use_1x1conv=use_1x1conv, strides=strides)

    def __call__(self, X: jax.Array) -> jax.Array:
        return self._output(X)


class _Chain(nnx.Module):  # type: ignore[misc]
    """Layers under their names, one after the other."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self.order = tuple(layers)
        for name, layer in layers.items():
            setattr(self, name, _Chain(models.numbered(layer)) if isinstance(layer, list) else layer)

    def __call__(self, X: jax.Array) -> jax.Array:
        for name in self.order:
            X = getattr(self, name)(X)
        return X


def _model(name: str, num_classes: int = 10, in_channels: int = 1, *, rngs: nnx.Rngs | None = None) -> nnx.Module:
    """The model with weights drawn from ``rngs``."""
    drawn = {"rngs": nnx.Rngs(0) if rngs is None else rngs}
    made: models.Models[nnx.Module] = models.Models(
        convolution=functools.partial(_convolution, **drawn),
        linear=functools.partial(_linear, **drawn),
        norm=functools.partial(_normalisation, **drawn),
        residual=functools.partial(Residual, **drawn),
        relu=lambda: nnx.relu,
        pool=lambda: functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2)),
        average=lambda: lambda X: X.mean((1, 2), keepdims=True),
        flatten=lambda: flatten,
        chain=lambda layers, size: _Chain(layers),
    )
    return made.by_name()[name](num_classes, in_channels)


MODELS = {name: functools.partial(_model, name) for name in recipes.MODELS}
resnet18, lenet = MODELS["resnet18"], MODELS["lenet"]


def flatten(X: jax.Array) -> jax.Array:
    """One row per sample; of images channel after channel, as PyTorch has them in memory."""
    return (jnp.moveaxis(X, -1, 1) if X.ndim > 2 else X).reshape(len(X), -1)


def _convolution(
    inputs: int, outputs: int, size: int, strides: int = 1, padding: int = 0, *, rngs: nnx.Rngs
) -> nnx.Conv:
    pads = (
        (padding, padding),
    ) * 2  # in numbers: "SAME" would pad another side than PyTorch where a stride leaves a choice
    values = _first_values(inputs * size**2, outputs * size**2)
    return nnx.Conv(inputs, outputs, (size, size), strides=strides, padding=pads, **values, rngs=rngs)


def _linear(inputs: int, outputs: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, **_first_values(inputs, outputs), rngs=rngs)


def _normalisation(width: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    return nnx.BatchNorm(width, momentum=0.9, epsilon=1e-5, rngs=rngs)


def _first_values(inputs: int, outputs: int) -> dict[str, Callable[..., jax.Array]]:
    """Weights are Xavier uniform; biases up to one by the root of the number of inputs, as in PyTorch."""
    return {"kernel_init": _uniform(math.sqrt(6 / (inputs + outputs))), "bias_init": _uniform(1 / math.sqrt(inputs))}


def _uniform(bound: float) -> Callable[..., jax.Array]:
    """Numbers between plus and minus the bound, drawn on the host: JAX would compile a program for every shape.

    (For ResNet-18 these take 15 seconds, the numbers of NumPy's generator none.)
    """

    def draw(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
        random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return jnp.asarray(random.uniform(-bound, bound, shape), dtype)

    return draw


# Module and DataModule


class _Kept(dict[str, Any]):
    """Arguments as one thing, not looked into: NNX compares and hashes what is no array."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]


class Module(recipes.Module, nnx.Module):  # type: ignore[misc]
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


class DataModule(recipes.DataModule):
    native = staticmethod(jnp.asarray)


# The trainer, and the functions of the book and of the command


class Trainer(recipes.BookTrainer, _trainer.Trainer):
    __doc__ = _trainer.Trainer.__doc__

    def prepare_batch(self, batch: Any) -> Any:
        """The batch as JAX's arrays, on the first of the trainer's devices."""
        return super().prepare_batch([tree.map_leaves(jnp.asarray, part) for part in batch])


class _Recipes(Recipes):
    framework = "jax"
    backend = _backend
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
        return MODELS[name](rngs=nnx.Rngs(seed))

    def nesterov(self, rate: float) -> optax.GradientTransformation:
        return optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(rate, momentum=0.9, nesterov=True))

    def tensors(self, model: nnx.Module) -> dict[str, Any]:
        numbers = Skeleton(model).numbers(model)
        leaves = by_name(numbers["parameters"]) | by_name(numbers["rest"])
        return {name: np.array(leaf) for name, leaf in leaves.items()}

    def restore(self, model: nnx.Module, weights: bytes) -> None:
        saved = tensors.arrays_for(weights, self.tensors(model), "weights of another model")
        skeleton = Skeleton(model)
        before = skeleton.numbers(model)
        after = {part: refill(before[part], saved) for part in ("parameters", "rest")}
        skeleton.put_into(model, {**before, **jax.tree.map(jnp.asarray, after)})

    @contextlib.contextmanager
    def in_float64(self, make: Callable[[], Any], data: Any) -> Iterator[nnx.Module]:
        with jax.enable_x64(True):
            net = make()
            if linen.is_linen(net):
                net = linen.as_nnx(net, linen.variables_of(net, *checks.first_inputs(net, data), 0), 0)
            to_double(net)
            yield net

    def load_weights(self, model: Any, run: str | Path) -> Any:
        """As in every framework; of a Linen module, bound to variables, one that is bound to the weights."""
        if not linen.is_linen(model):
            return super().load_weights(model, run)
        return linen.as_linen(super().load_weights(linen.with_weights(model), run), model.variables)

    # Accuracy

    def count(self, y_hat: jax.Array, y: jax.Array) -> jax.Array:
        classes = y_hat.argmax(1) if y_hat.ndim > 1 and y_hat.shape[1] > 1 else y_hat
        return (classes.reshape(y.shape).astype(y.dtype) == y).sum()

    @contextlib.contextmanager
    def predictors(self, net: Any, devices: Sequence[jax.Device | None]) -> Iterator[Sequence[Predictor]]:
        def on(device: jax.Device | None) -> Predictor:
            if not isinstance(net, nnx.Module):
                return net  # type: ignore[no-any-return]
            graph, state = nnx.split(net)
            state = state if device is None else jax.device_put(state, device)
            compiled = jax.jit(lambda state, X: for_evaluation(nnx.merge(graph, state))(X))
            return functools.partial(compiled, state)

        yield [on(device) for device in devices]


BOOK = _Recipes()
train, load_data_fashion_mnist, split_batch = BOOK.train, BOOK.load_data_fashion_mnist, BOOK.split_batch
load_model, load_weights, accuracy = BOOK.load_model, BOOK.load_weights, BOOK.accuracy
evaluate_accuracy_gpu, evaluate_accuracy_gpus = BOOK.evaluate_accuracy_gpu, BOOK.evaluate_accuracy_gpus
__all__ = ["Trainer", "load_model", "load_weights", *NAMES]
