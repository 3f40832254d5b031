"""Checks before a job begins.

They make no pass through the model or the loss, with one exception: with ``accumulate`` a batch is processed in parts,
and a loss that we do not know is tried (:mod:`manyhands.training.loss.loss_trial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from manyhands.errors import BadSettings
from manyhands.training.data.labels import ClassLabels, Look, check_sources
from manyhands.training.data.sources import Arrays, Source
from manyhands.training.jax import skeleton as models
from manyhands.training.jax.objective import (
    Arguments,
    Objective,
    Supervised,
    arguments_of,
    cross_entropy,
    size_of,
    target_of,
)
from manyhands.training.jax.skeleton import Skeleton
from manyhands.training.loss import loss_trial
from manyhands.training.loss.loss_trial import Pass, Term


def check_labels(model: nnx.Module, objective: Objective, *sources: Source | None) -> Look | None:
    """Check that the model has an output for every label: JAX would compute something for any label."""
    if not isinstance(objective, Supervised) or objective.loss_of(model) is not cross_entropy:
        return None
    objective.labels = labels = ClassLabels(one_hot=True)
    return check_sources(labels, target_of, *sources)


def first_inputs(module: Any, data: Source) -> Arguments:
    """What a model that gets its shapes from a first sample is called with."""
    if data.is_read_once:
        raise BadSettings(
            "a Linen module needs a sample to get its shapes, and the loader can be read only once: give "
            "module.bind(module.init(jax.random.key(0), X[:1]))"
        )
    return arguments_of(module, data.few(1, jax.numpy.asarray))


def check_loss(model: nnx.Module, skeleton: Skeleton, objective: Objective, data: Source) -> list[str]:
    """Refuse a loss that is not a mean over samples; notes if that could not be checked."""
    numbers = skeleton.numbers(model)
    is_known = isinstance(objective, Supervised) and objective.loss_of(model) is cross_entropy

    def total_of(parameters: Any, batch: Any) -> tuple[Any, Any]:
        copy = models.for_evaluation(skeleton.model({**numbers, "parameters": parameters}))
        value = objective(copy, batch, training=True)
        size = size_of(batch)
        return (value.loss * size, size) if value.count is None else (value.loss, value.count)

    gradients_of = jax.jit(jax.value_and_grad(total_of, has_aux=True))  # a program for each of a few sizes

    def compute(arrays: Arrays, rows: Sequence[int]) -> Pass:
        picked = arrays.prepare(tuple(map(arrays.native, arrays.rows(rows))))
        parts = arrays.nest(tuple(map(jax.numpy.asarray, picked)))
        (total, count), gradients = gradients_of(numbers["parameters"], parts)
        of_leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(gradients)]
        return Pass([Term(float(total), float(count), of_leaves)])

    precisions = {str(leaf.dtype) for leaf in jax.tree.leaves(numbers["parameters"])}
    own = not isinstance(objective, Supervised)
    return loss_trial.check_source(data, compute, precisions=precisions, own_step=own, labels_weigh=not is_known)
