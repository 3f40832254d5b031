"""Fashion-MNIST as a source: bytes in memory, turned into images on the device."""

from __future__ import annotations

from pathlib import Path

import torch

from manyhands.training.data import fashion_mnist
from manyhands.training.torch.data.sources import Arrays, scale_images


def load_data_fashion_mnist(batch_size: int, path: str | Path | None = None) -> tuple[Arrays, Arrays]:
    """The training and the test set, as loaders of batches (images of shape (n, 1, 28, 28) from 0 to 1, labels)."""
    return of(fashion_mnist.load(path), batch_size)


def of(data: fashion_mnist.FashionMnist, batch_size: int | None) -> tuple[Arrays, Arrays]:
    def arrays(part: fashion_mnist.Images, *, shuffle: bool) -> Arrays:
        tensors = (torch.from_numpy(part.images), torch.from_numpy(part.labels))
        return Arrays(tensors, scale_images, batch_size, shuffle)

    return arrays(data.train, shuffle=True), arrays(data.test, shuffle=False)
