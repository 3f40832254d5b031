"""The models that examples and experiments train, written with Flax NNX's own layers.

Images are 28 by 28 (Fashion-MNIST) unless a docstring says more, with their channels last: ``(n, 28, 28, 1)``.
Weights are Xavier uniform and biases small, both drawn from ``rngs``: a seed gives the same net on every device. The
layers, and the order in which features are flattened, are those of the PyTorch models, so that weights move between
the two (:mod:`.weight_names`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from manyhands.training.book.architecture import RESNET18, SMALL_RESNET, residual_width

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
