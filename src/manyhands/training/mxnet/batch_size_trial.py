"""Steps on a Gluon block that leave no trace, for ``trainer.find_batch_size``.

A deep copy of a block cannot be trained: its parameters have no place for gradients. So the steps are made on the block
itself, with copies of its arrays in it. The caller's arrays are set aside and never written to, so they come back
bit-equal, even after an error of MXNet's engine, which spoils every array that a failed operation would have written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mxnet as mx

from manyhands.training.data import loader_randomness
from manyhands.training.mxnet import modes
from manyhands.training.mxnet.step import replicas

# Of MXNet's errors, those that say that a batch is too large.
_TOO_LARGE = ("out of memory", "Failed to allocate CPU Memory", "larger than 2^31 elements")


@contextlib.contextmanager
def model_preserved(model: Any) -> Iterator[None]:
    """Within it the model may be trained; afterwards it is unchanged, even if it had no values or shapes yet."""
    parameters = [(parameter, dict(vars(parameter))) for parameter in replicas.distinct(model)]
    blocks = [(block, dict(vars(block))) for block in replicas.layers(model)]
    arrays = [(array, array.copy()) for array in replicas.plain_arrays(model).values()]
    with modes.numpy_like(modes.of_model(model)), loader_randomness.preserved():
        try:
            for parameter, _ in parameters:
                if parameter._data is not None:
                    parameter._data = [array.copy() for array in parameter._data]
                    parameter._init_grad()
            yield
        finally:
            with contextlib.suppress(mx.MXNetError):
                mx.nd.waitall()
            for owner, values in (*parameters, *blocks):
                vars(owner).clear()
                vars(owner).update(values)
            for array, before in arrays:
                before.copyto(array)


def is_too_large(error: Exception) -> bool:
    return isinstance(error, mx.MXNetError) and any(words in str(error) for words in _TOO_LARGE)
