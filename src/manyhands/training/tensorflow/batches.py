"""Which parts of a batch are the model's inputs, which its targets, and whether the last one weighs the samples.

A batch is what Keras's ``fit`` takes: ``(x, y)`` or ``(x, y, sample_weight)``, where each may be a dict or a list of
arrays. Or it is arrays alone, ``(inputs..., target, [sample_weight])``; the model says how many inputs there are: a
graph of layers knows, and a user's class names them in ``call``. For a model that takes any number of inputs the last
part is the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from manyhands.amounts import counted
from manyhands.errors import BadBatch, ManyhandsError
from manyhands.training import refusals
from manyhands.training.data.roles import Inputs, argument_range
from manyhands.training.data.sources import is_nested
from manyhands.training.loss.own_step import is_default


@dataclass(frozen=True)
class Parts:
    inputs: tuple[Any, ...]  # the arguments of the model
    target: Any  # as Keras's losses take it: one tensor, or a list or a dict of them
    sample_weight: Any = None

    @property
    def has_one_target(self) -> bool:
        return not is_nested(self.target)


def parts_of(model: Any, batch: Sequence[Any]) -> Parts:
    if len(batch) < 2:
        raise refusals.no_target(batch)
    fewest, most = (1, 1) if any(map(is_nested, batch)) else _inputs(model)
    inputs = int(min(most, len(batch) - 1))
    if inputs < fewest or len(batch) > inputs + 2:
        takes = ("" if fewest == most else f"{fewest} to ") + counted(most, "input")
        raise BadBatch(
            f"a batch has {counted(len(batch), 'part')}, but {type(model).__name__} takes {takes}: give (inputs..., "
            "target) or (inputs..., target, sample_weight), with several targets in a list or a dict"
        )
    return Parts(tuple(batch[:inputs]), *batch[inputs:])


def inputs_of(model: Any, batch: Sequence[Any], inputs: Inputs) -> tuple[Any, ...]:
    """The model's inputs in a batch that may have no targets."""
    if len(batch) == 1 or inputs.targets is False:
        return tuple(batch)
    if inputs.targets is None and not any(map(is_nested, batch)) and len(batch) <= inputs.arrays:
        return tuple(batch[: inputs.count(len(batch))])
    return parts_of(model, batch).inputs


def inputs_for(model: Any, targets: bool | None) -> Inputs:
    """The inputs of a model, for prediction; ``targets``: whether the last part of the data is a target."""
    fewest, most = _inputs(model)
    return Inputs(type(model).__name__, fewest, most, most, targets)


def _inputs(model: Any) -> tuple[int, float]:
    """The fewest and the most inputs that a model takes."""
    if isinstance(model, Functional):
        return len(model.inputs), len(model.inputs)
    if isinstance(model, keras.Sequential):
        return 1, 1
    call = model.call
    if is_default(model, "call"):  # the book's Module calls forward
        if is_default(model, "forward"):
            net = getattr(model, "net", None)
            return _inputs(net) if isinstance(net, keras.Layer) else (1, math.inf)
        call = model.forward
    return argument_range(call, ("training", "mask"))


def output_of(model: Any, inputs: Sequence[Any], *, training: bool) -> Any:
    """The model's output. If it does not take such inputs, the error describes the user's data."""
    try:
        if isinstance(model, Functional) and len(inputs) > 1:
            return model(list(inputs), training=training)
        return model(*inputs, training=training)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, ManyhandsError):
            raise
        wanted = ", ".join(map(_shape_of, getattr(model, "inputs", None) or ()))
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        takes = f"takes inputs of shape {wanted}" if wanted else f"does not take it ({reason})"
        images = any(isinstance(layer, keras.layers.Conv2D) for layer in model._flatten_layers())
        grey = images and any(len(tensor.shape) == 3 for tensor in keras.tree.flatten(inputs))
        cure = ": images need an axis of channels, X[..., np.newaxis] gives grey ones theirs" if grey else ""
        shapes = ", ".join(map(_shape_of, inputs))
        raise BadBatch(f"a sample of the data has shape {shapes}, and {type(model).__name__} {takes}{cure}") from error


def _shape_of(part: Any) -> str:
    """The shape of one sample; of a dict, shapes by name."""
    if isinstance(part, dict):
        return ", ".join(f"{name!r}: {_shape_of(value)}" for name, value in part.items())
    return ", ".join(str(tuple(leaf.shape[1:])) for leaf in keras.tree.flatten(part))
