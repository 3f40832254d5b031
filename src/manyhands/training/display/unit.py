"""The unit in which the speed of a training is shown: what its samples are called."""

from __future__ import annotations

from typing import Any

from manyhands import tree

_CHANNELS = (1, 3, 4)  # of an image
_SMALLEST = 8  # pixels of a side


def unit_of(data: Any, batch: Any) -> str:
    """``images`` where the samples are images for certain, else ``samples``.

    ``data`` is what is trained on, ``batch`` the first batch, in the form that the framework's step takes.
    """
    arrays = getattr(data, "arrays", None) or getattr(data, "tensors", None)
    if arrays is None:
        leaves = [] if batch is None or callable(batch) else tree.flatten(batch)[0]
        arrays = [leaf for leaf in leaves if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    return "images" if len(arrays) and is_images(tuple(arrays[0].shape), str(arrays[0].dtype)) else "samples"


def is_images(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether an array of this shape is a batch of images: of channels and two sides, or bytes without channels.

    >>> is_images((64, 3, 32, 32), "float32"), is_images((64, 28, 28), "uint8"), is_images((64, 28, 28), "float32")
    (True, True, False)
    """
    if len(shape) == 3:
        return dtype.endswith("uint8") and min(shape[1:]) >= _SMALLEST
    if len(shape) != 4:
        return False
    first = shape[1] in _CHANNELS and min(shape[2:]) >= _SMALLEST
    return first or (shape[3] in _CHANNELS and min(shape[1:3]) >= _SMALLEST)
