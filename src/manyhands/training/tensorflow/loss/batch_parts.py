"""Which parts of a batch are the model's inputs, which its targets, and whether the last one weighs the samples.

A batch of arrays is ``(inputs..., targets..., [sample_weight])``. The model says how many inputs and outputs there are:
a graph of layers knows both, and a user's class names its inputs in ``call``. For a model that takes any number of
inputs the last part is the target. A batch with dicts or lists of arrays is what Keras's ``fit`` takes: ``(x, y)`` or
``(x, y, sample_weight)``.
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
from manyhands.training.data.sources import is_nested
from manyhands.training.evaluation.inputs import Inputs, argument_range
from manyhands.training.loss.own_step import is_default

_NOT_INPUTS = ("training", "mask")


@dataclass(frozen=True)
class Parts:
    inputs: tuple[Any, ...]  # the arguments of the model
    target: Any  # as Keras's losses take it: one tensor, or a list or a dict of them
    sample_weight: Any = None

    @property
    def has_one_target(self) -> bool:
        return not is_nested(self.target)


def parts_of(model: Any, batch: Sequence[Any]) -> Parts:
    count = len(batch)
    if count < 2:
        raise refusals.no_target(batch)
    if any(map(is_nested, batch)):
        if count > 3:
            raise BadBatch(
                f"a batch has {count} parts, with dicts or lists among them: give (x, y) or (x, y, sample_weight), as "
                "you would to model.fit"
            )
        return Parts(tuple(batch[:1]), *batch[1:])
    fewest, most = _inputs(model)
    outputs = _outputs(model)
    for targets, weighted in dict.fromkeys([(outputs, 0), (outputs, 1), (1, 0)]):
        inputs = count - targets - weighted
        if fewest <= inputs <= most:
            rows, target = tuple(batch), batch[inputs] if targets == 1 else list(batch[inputs : inputs + targets])
            return Parts(rows[:inputs], target, rows[-1] if weighted else None)
    takes = ("" if fewest == most else f"{fewest} to ") + counted(most, "input")
    raise BadBatch(
        f"a batch has {counted(count, 'part')}, but {type(model).__name__} takes {takes} and "
        f"gives {counted(outputs, 'output')}: give (inputs..., targets...), or (inputs..., "
        "targets..., sample_weight)"
    )


def inputs_of(model: Any, batch: Sequence[Any], inputs: Inputs | None = None) -> tuple[Any, ...]:
    """The model's inputs in a batch with targets; ``inputs``: in one for prediction, which may have none."""
    if any(map(is_nested, batch)):  # as Keras's fit takes it: (x,), (x, y) or (x, y, sample_weight)
        return tuple(batch) if inputs is not None and len(batch) == 1 else parts_of(model, batch).inputs
    if inputs is not None:
        if inputs.targets is False:
            return tuple(batch)
        if inputs.targets is None and len(batch) <= inputs.arrays:
            return tuple(batch[: inputs.count(len(batch))])
    fewest, most = _inputs(model)
    outputs, count = _outputs(model), len(batch)
    labelled = any(fewest <= count - behind <= most for behind in (outputs, outputs + 1, 1))
    return tuple(batch) if not labelled and fewest <= count <= most else parts_of(model, batch).inputs


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
    if is_default(model, "call"):  # the book's Module calls forward
        if not is_default(model, "forward"):
            return argument_range(model.forward, _NOT_INPUTS)
        net = getattr(model, "net", None)
        return _inputs(net) if isinstance(net, keras.Layer) else (1, math.inf)
    return argument_range(model.call, _NOT_INPUTS)


def _outputs(model: Any) -> int:
    return len(model.outputs) if isinstance(model, Functional) else 1


def checked_output(model: Any, parts: Parts, *, training: bool) -> Any:
    """The model's output. If it does not take such inputs, the error describes the user's data."""
    try:
        return output_of(model, parts.inputs, training=training)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, ManyhandsError):
            raise
        named = any(isinstance(part, dict) for part in parts.inputs)
        shapes = ", ".join(_shape_of(part) for part in parts.inputs)
        inputs = getattr(model, "inputs", None) or ()
        wanted = ", ".join(_shape_of({tensor.name: tensor} if named else tensor) for tensor in inputs)
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        takes = f"takes inputs of shape {wanted}" if wanted else f"does not take it ({reason})"
        raise BadBatch(
            f"a sample of the data has shape {shapes}, and {type(model).__name__} {takes}{_cure(parts, model)}"
        ) from error


def _shape_of(part: Any) -> str:
    """Of one sample, by name where there are names."""
    if isinstance(part, dict):
        return ", ".join(f"{name!r}: {_shape_of(value)}" for name, value in part.items())
    return ", ".join(str(tuple(leaf.shape[1:])) for leaf in keras.tree.flatten(part))


def _cure(parts: Parts, model: Any) -> str:
    if any(len(tensor.shape) == 3 for tensor in keras.tree.flatten(parts.inputs)) and any(
        isinstance(layer, keras.layers.Conv2D) for layer in model._flatten_layers()
    ):
        return ": images need an axis of channels, X[..., np.newaxis] gives grey ones theirs"
    return ""


def output_of(model: Any, inputs: Sequence[Any], *, training: bool) -> Any:
    """The model's output; a functional model takes several inputs as a list."""
    if isinstance(model, Functional) and len(inputs) > 1:
        return model(list(inputs), training=training)
    return model(*inputs, training=training)
