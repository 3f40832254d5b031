"""Measures a training step in JAX, which runs it as one program: it is timed as a whole, by short fits.

So the seconds of its parts are not known (a backward pass counts as two forward passes), gradients are taken to come
evenly, and memory is not forecast.
"""

from __future__ import annotations

import copy
from statistics import median
from typing import Any

import jax
import numpy as np
from flax import nnx

from manyhands import machine
from manyhands.backends.jax import devices as backend
from manyhands.errors import BadSettings
from manyhands.forecast.profile import Profile, StepTime, spread_buckets
from manyhands.training.jax.trainer import Trainer
from manyhands.training.options import Settings

_STEPS, _EPOCHS = 8, 3  # of each fit; the first epoch compiles, and does not count
_FORWARD = 1 / 3


def has_gpu() -> bool:
    """Whether there is a real GPU; virtual devices stand in for GPUs, and are as fast as the CPU."""
    return backend.num_gpus() > 0 and backend.neutral(backend.gpu(0)).kind == "gpu"


def noise(batch_size: int) -> Any:
    """A batch for a model of ``manyhands train``."""
    random = np.random.default_rng(0)
    return random.random((batch_size, 28, 28, 1), np.float32), random.integers(0, 10, batch_size, dtype=np.int32)


def profile(
    model: nnx.Module, batch: Any, *, loss: Any, optimizer: Any, settings: Settings, device: Any = None
) -> Profile:
    """Measure a step of a copy of the model on the batch, and on a half and a quarter of it."""
    parts, times = _arrays(batch), []
    size, place = len(parts[0]), device or ("gpu:0" if has_gpu() else "cpu")
    options = {"loss": loss, "optimizer": optimizer, "lr": settings.lr, "precision": settings.precision}
    for shard in sorted({size, -(-size // 2), -(-size // 4)}, reverse=True):
        data = tuple(np.resize(part[:shard], (_STEPS * shard, *part.shape[1:])) for part in parts)
        trainer = Trainer(_EPOCHS, batch_size=shard, devices=[place], quiet=True, **options)
        result = trainer.fit(copy.deepcopy(model), data)
        seconds = median(row["seconds"] for row in result.rows[1:]) / _STEPS
        times.append(StepTime(shard, seconds * _FORWARD, seconds * (1 - _FORWARD), 0.0))
    on_gpu = has_gpu() and "cpu" not in str(place).lower()
    return Profile(
        type(model).__name__,
        "GPU" if on_gpu else machine.host_name(),
        size,
        tuple(times),
        spread_buckets(sum(int(leaf.nbytes) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))),
        kind="gpu" if on_gpu else "cpu",
        input_bytes=sum(part.nbytes for part in parts) / size,
        notes=("Memory is not forecast for JAX; a step is timed as a whole.",),
    )


def resize(batch: Any, batch_size: int) -> Any:
    """A batch of ``batch_size`` samples, taken from another batch; they repeat if there are too few."""
    return tuple(part[np.arange(batch_size) % len(part)] for part in _arrays(batch))


def _arrays(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise BadSettings(f"a batch of type {type(batch).__name__} cannot be timed here: give arrays (X, y)")
    inputs, target = (np.asarray(part) for part in batch)
    if not inputs.ndim or not target.ndim or not len(inputs) or len(inputs) != len(target):
        raise BadSettings(f"a batch of shapes {inputs.shape} and {target.shape}: give as many labels as samples")
    return inputs, target
