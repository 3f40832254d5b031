"""MXNet's two kinds of arrays: ``mx.np`` after ``npx.set_np()``, ``mx.nd`` otherwise.

manyhands sets neither: a model needs the mode in which its parameters were created, and arrays of that kind. So
training switches to the model's mode, whatever the program's mode is, and back again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

# What MXNet has no arrays of, and what holds the same numbers.
_WIDER = {"int16": "int64", "uint16": "int64", "uint32": "int64", "uint64": "int64"}


@contextlib.contextmanager
def numpy_like(on: bool = True) -> Iterator[None]:
    """Within it MXNet has NumPy's semantics, or its older ones."""
    shape, array = mx.util.np_shape(on), mx.util.np_array(on)
    # MXNet refuses NumPy's arrays without NumPy's shapes, also for a moment.
    first, second = (shape, array) if on else (array, shape)
    with first, second:
        yield


def of_model(model: Any) -> bool:
    """Whether a model is one of NumPy's mode; one that has no values yet is of the program's."""
    for parameter in model.collect_params().values():
        if parameter._data is not None:
            return isinstance(parameter._data[0], mx.np.ndarray)
    return bool(mx.util.is_np_array())


def native(array: NDArray[Any], device: mx.Context | None = None) -> Any:
    """An array of NumPy's as MXNet's, of the kind that the mode asks for, in the same dtype."""
    array = np.asarray(array)
    kind = _WIDER.get(array.dtype.name, array.dtype.name)
    module = mx.np if mx.util.is_np_array() else mx.nd
    return module.array(array, dtype=kind, ctx=device or mx.current_context())


def take(array: Any, numbers: Any) -> Any:
    """The rows of those numbers, gathered on the device."""
    return (mx.np if isinstance(array, mx.np.ndarray) else mx.nd).take(array, numbers, axis=0, mode="clip")
