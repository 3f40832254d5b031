"""What experiments need of JAX (:mod:`manyhands.lab.operations`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from manyhands.backends.jax.devices import matmul as matmul


def tensor(values: Any) -> jax.Array:
    return jax.device_put(values, jax.devices("cpu")[0])


numpy, norm, relu, transpose = jax.device_get, jnp.linalg.norm, jax.nn.relu, jnp.transpose


def join(tensors: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([x.reshape(-1) for x in tensors])


def cut(joined: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    return [part.reshape(shape) for part, shape in zip(jnp.split(joined, ends[:-1]), shapes, strict=True)]


def number(x: jax.Array, index: int) -> float:
    return float(x[0, index])


def with_number(x: jax.Array, index: int, value: float) -> jax.Array:
    return x.at[0, index].set(value)


def pin(x: jax.Array) -> None:
    return None
