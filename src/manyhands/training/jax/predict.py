"""``mh.predict`` in JAX: see :mod:`manyhands.training.predict_by_fit`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from manyhands.training.jax import command
from manyhands.training.jax.trainer import Trainer
from manyhands.training.predict_by_fit import PredictByFit
from manyhands.training.predict_by_fit import resized as resized


@contextlib.contextmanager
def _trial(model: nnx.Module, inputs: Any) -> Iterator[nnx.Module]:
    yield copy.deepcopy(model)


def _gradient_bytes(model: nnx.Module) -> int:
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


predict = PredictByFit("jax", Trainer, _trial, _gradient_bytes, command.model, (28, 28, 1))
example, has_gpu = predict.example, predict.has_gpu
