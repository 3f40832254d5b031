"""What experiments need of JAX (:mod:`manyhands.lab.operations`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from manyhands.backends.jax.devices import matmul as matmul


def tensor(values: Any) -> jax.Array:
    return jax.device_put(values, jax.devices("cpu")[0])


def numpy(value: Any) -> Any:
    return jax.device_get(value)


def norm(x: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x)


def relu(x: jax.Array) -> jax.Array:
    return jax.nn.relu(x)
