"""What experiments need of JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from manyhands.backends.jax.devices import matmul as matmul


def tensor(values: Any) -> jax.Array:
    return jax.device_put(values, jax.devices("cpu")[0])


numpy, norm, relu, transpose = jax.device_get, jnp.linalg.norm, jax.nn.relu, jnp.transpose


def with_number(x: jax.Array, index: int, value: float) -> jax.Array:
    return x.at[0, index].set(value)


# A copy in page-locked memory of the host; None if the framework has no such memory.
def pin(x: jax.Array) -> None:
    return None
