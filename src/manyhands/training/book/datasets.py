"""Fashion-MNIST as sources of a framework: bytes in memory, turned into images on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.training.data.fashion_mnist import FashionMnist, Images
from manyhands.training.data.sources import Arrays, Batch


def fashion_mnist_arrays(
    data: FashionMnist, prepare: Callable[[Batch], Batch], native: Callable[[Any], Any], batch_size: int | None
) -> tuple[Arrays, Arrays]:
    """The training part, shuffled, and the test part; ``prepare`` and ``native`` as in :class:`Arrays`."""

    def arrays(part: Images, *, shuffle: bool) -> Arrays:
        return Arrays((part.images, part.labels), prepare, native, batch_size, shuffle)

    return arrays(data.train, shuffle=True), arrays(data.test, shuffle=False)
