"""Weights of samples for Gluon's own losses: ``(inputs..., target, sample_weight)``.

A batch with one part more than the model's inputs and a target has weights, if the loss is one of Gluon's, which take
them. As in Gluon a sample's loss is multiplied by its weight, and the mean is still over all samples.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from mxnet import gluon

from manyhands.errors import BadBatch
from manyhands.training.evaluation.inputs import argument_range


def parts_of(model: Any, loss: Any, batch: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
    """The inputs, the target and the weights (or None) of a batch."""
    if not are_in(model, loss, len(batch)):
        return batch[:-1], batch[-1], None
    return batch[:-2], batch[-2], batch[-1]


def are_in(model: Any, loss: Any, parts: int) -> bool:
    """Whether the last part of a batch with this many is the weights."""
    if parts < 3 or not isinstance(loss, gluon.loss.Loss):
        return False
    fewest, most = _inputs(model)
    return parts - 1 > most and fewest <= parts - 2 <= most


def weighted(loss: gluon.loss.Loss, output: Any, target: Any, weight: Any) -> Any:
    """The losses of the samples, times their weights."""
    names = list(inspect.signature(type(loss).hybrid_forward).parameters)
    if names[4:5] != ["sample_weight"]:
        raise BadBatch(
            f"the data have sample weights, and {type(loss).__name__} does not take them as its third argument: give "
            "loss=lambda output, target: ..., and a training_step(batch) for the weights"
        )
    if len(weight.shape) == 1:
        weight = weight.reshape((-1, *[1] * (len(output.shape) - 1)))
    return loss(output, target, weight.astype(output.dtype))


def _inputs(model: Any) -> tuple[int, float]:
    """The fewest and the most inputs that a model takes."""
    if isinstance(model, (gluon.nn.Sequential, gluon.nn.HybridSequential)):
        return 1, 1
    is_hybrid = isinstance(model, gluon.HybridBlock) and type(model).forward is gluon.HybridBlock.forward
    function = functools.partial(model.hybrid_forward, None) if is_hybrid else model.forward
    return argument_range(function, list(getattr(model, "_reg_params", {})))
