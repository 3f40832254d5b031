"""Makes normalisation layers ignore padding rows, which only fill up a device's part of a batch.

NNX's ``BatchNorm`` takes a mask, but a model's author seldom passes one on. So the layers of a model that lives for one
trace are replaced: each becomes one of a class that adds the mask itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from manyhands.amounts import counted
from manyhands.errors import BadSettings
from manyhands.training.jax import linen


def counting_only(model: nnx.Module, samples: NDArray[np.bool_] | None) -> nnx.Module:
    """Let every BatchNorm of the model take its statistics over the rows that are samples (None: all of them)."""
    if samples is None:
        return model
    weights = jnp.asarray(samples)
    for _, layer in nnx.iter_modules(model):
        if linen.keeps_statistics(layer):
            raise BadSettings(
                "uneven shares pad every device's part of the batch, and the statistics of a Linen module would count "
                "the padding: leave out shares, or write the model with nnx.BatchNorm"
            )
        if isinstance(layer, nnx.BatchNorm):
            object.__setattr__(layer, "__class__", _masked(type(layer), weights))
    return model


def _masked(kind: Any, weights: jax.Array) -> Any:
    def call(self: Any, x: jax.Array, *arguments: Any, mask: jax.Array | None = None, **others: Any) -> jax.Array:
        if len(x) != len(weights):
            raise BadSettings(
                f"uneven shares pad every device's part of the batch, and a {kind.__name__} sees "
                f"{counted(len(x), 'row')} of {counted(len(weights), 'sample')}: it cannot know which are padding. "
                "Leave out shares"
            )
        rows = weights.reshape(-1, *[1] * (x.ndim - 1))
        output: jax.Array = kind.__call__(
            self, x, *arguments, mask=rows if mask is None else rows & mask.astype(bool), **others
        )
        return output

    return type(kind.__name__, (kind,), {"__call__": call})
