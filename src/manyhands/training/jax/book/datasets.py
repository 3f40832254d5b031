"""Fashion-MNIST as a source: bytes in memory, turned into images on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from manyhands.training.book.datasets import fashion_mnist_arrays
from manyhands.training.data import fashion_mnist
from manyhands.training.data.sources import Arrays


def load_data_fashion_mnist(batch_size: int, path: str | Path | None = None) -> tuple[Arrays, Arrays]:
    """The training and the test set, as loaders of batches (images of shape (n, 28, 28, 1) from 0 to 1, labels)."""
    return of(fashion_mnist.load(path), batch_size)


def of(data: fashion_mnist.FashionMnist, batch_size: int | None) -> tuple[Arrays, Arrays]:
    return fashion_mnist_arrays(data, scale_images, jnp.asarray, batch_size)


def scale_images(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Bytes to numbers from 0 to 1, with an axis for the one channel, which comes last."""
    images, labels = batch
    return (images.astype(jnp.float32) / 255)[..., None], labels.astype(jnp.int32)
