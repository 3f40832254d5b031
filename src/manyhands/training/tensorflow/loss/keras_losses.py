"""Keras's losses, taken apart so that the parts of a batch add up.

Keras reduces the losses of a batch to a mean. On several devices, or with ``accumulate``, each part of a batch has a
mean of its own, and those can be put together only if it is known what each was divided by. So the losses are reduced
here: to a mean over samples, where the divisor grows with the number of samples alone, else to a sum and its divisor
(:class:`~manyhands.training.loss.own_step.LossSum`). The second is needed where tokens are masked, where labels of
``ignore_class`` are left out, and for ``reduction="mean_with_sample_weight"``. Six tokens of which five count on one
device and six of which two count on the other: (a + b) / 7, not the mean of a / 5 and b / 2. Where Keras divides by
nothing, with ``reduction="sum"`` or ``None``, neither do we (:class:`Total`).

Losses are resolved and called as Keras does it: ``loss(y_true, y_pred)``, by name, as a class, an object or a function,
one for each output, with ``loss_weights``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import ALL_OBJECTS_DICT
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.compile_utils import CompileLoss

from manyhands.amounts import counted
from manyhands.errors import BadSettings
from manyhands.training import refusals
from manyhands.training.data.sources import is_nested
from manyhands.training.loss.own_step import LossSum

_BY_SHAPE = ("crossentropy", "ce")  # Keras chooses among three by the shapes of targets and outputs
_UNREDUCED = ("none", None)
_MEANS = ("sum_over_batch_size", "mean")
# Functions of Keras that compare each number of the output with one of the target.
_PAIRING = {"mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "huber", "log_cosh"}
_PAIRING |= {"mean_squared_logarithmic_error", "binary_crossentropy", "binary_focal_crossentropy", "poisson"}


@dataclass(frozen=True)
class Total:
    """A sum over samples that nothing divides: Keras's ``reduction="sum"``.

    With ``reduction=None`` Keras minimises the sum of all numbers, and shows their mean; ``per_sample`` is then how
    many of them a sample has.
    """

    value: Any
    per_sample: Any = None

    def __add__(self, other: Total) -> Total:
        return Total(self.value + tf.cast(other.value, self.value.dtype), self.per_sample)

    def shown(self, whole: Any) -> Any:
        """Its share of the shown loss, as a sum over samples; the batch has ``whole`` samples."""
        value = tf.cast(self.value, tf.float64)
        if self.per_sample is None:
            return value * tf.cast(whole, tf.float64)
        return tf.math.divide_no_nan(value, tf.cast(self.per_sample, tf.float64))


@dataclass(frozen=True)
class Losses:
    """The loss of a part of a batch: a mean over its samples, plus sums that are divided once all parts are known.

    ``total`` is added to it as it is. ``by_user``: the sums are a LossSum of the user's, of which there is no mean
    where nothing counts. Keras's own masked losses are 0 then.
    """

    mean: Any = None
    sums: tuple[LossSum, ...] = ()
    total: Total | None = None
    correct: Any = None  # how many samples were predicted correctly, where that has a meaning
    complete: bool = False  # whether regularizers and add_loss are in it already
    by_user: bool = False
    output: Any = None  # the model's, and the targets, where the objective knows them
    targets: Any = None

    def __add__(self, other: Losses) -> Losses:
        _check_reductions(self, other)
        means = [losses.mean for losses in (self, other) if losses.mean is not None]
        mean = tf.add_n([tf.cast(value, means[0].dtype) for value in means]) if means else None
        totals = [losses.total for losses in (self, other) if losses.total is not None]
        total = functools.reduce(Total.__add__, totals) if totals else None
        by_user = self.by_user or other.by_user
        return replace(self, mean=mean, sums=self.sums + other.sums, total=total, by_user=by_user)

    def __mul__(self, weight: Any) -> Losses:
        def times(value: Any) -> Any:
            return value * tf.cast(weight, value.dtype)

        mean = None if self.mean is None else times(self.mean)
        sums = tuple(LossSum(times(part.total), part.count) for part in self.sums)
        total = None if self.total is None else replace(self.total, value=times(self.total.value))
        return replace(self, mean=mean, sums=sums, total=total)


def _check_reductions(*losses: Losses) -> None:
    """Numbers for each sample cannot be added to one number: Keras fails there, too."""
    present = [part for part in losses if part.mean is not None or part.sums or part.total is not None]
    kinds = [part.total is not None and part.total.per_sample is not None for part in present]
    if any(kinds) and not all(kinds):
        raise BadSettings(
            "a loss with reduction=None gives numbers for each sample, to which other losses, regularizers and "
            "add_loss cannot be added: give it reduction='sum', which minimises the same"
        )


@dataclass
class KerasLoss:
    """The user's ``loss``, of the trainer or of ``model.compile``."""

    loss: Any
    loss_weights: Any = None
    output_names: Sequence[str] | None = None
    _resolved: CompileLoss | None = field(default=None, repr=False)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Losses:
        y_true = self._by_output("y", y_true, y_pred)
        if is_nested(sample_weight):
            sample_weight = self._by_output("sample_weight", sample_weight, y_pred)
        total = Losses()
        for path, loss, weight, _ in self._flat(y_true, y_pred):
            truth, output = _at(y_true, path), _at(y_pred, path)
            weights = _at(sample_weight, path, missing=None) if is_nested(sample_weight) else sample_weight
            of_output = losses_of(loss, truth, output, weights, self._dtype(loss, output))
            total += of_output if weight is None else of_output * weight
        return total

    def _by_output(self, name: str, parts: Any, y_pred: Any) -> Any:
        """Targets, or weights, in the structure of the model's outputs: a list by their order, a dict by name."""
        if not is_nested(parts):
            return [parts] if isinstance(y_pred, (tuple, list)) and len(y_pred) == 1 else parts
        names = list(y_pred) if isinstance(y_pred, dict) else list(self.output_names or ())
        if isinstance(parts, dict) and not isinstance(y_pred, dict) and not set(parts) <= set(names):
            raise BadSettings(
                f"{name} is a dict of {', '.join(map(repr, parts))}, and the model's outputs are "
                f"{', '.join(map(repr, names)) or 'without names'}: give {name} under the names of the outputs, or as "
                "a list"
            )
        if not is_nested(y_pred):
            if len(parts) != 1:
                raise BadSettings(
                    f"{name} has {counted(len(parts), 'part')}, and the model has one output: give one array"
                )
            return next(iter(parts.values() if isinstance(parts, dict) else parts))
        if isinstance(y_pred, dict):
            return parts if isinstance(parts, dict) else dict(zip(self.output_names or y_pred, parts, strict=True))
        return type(y_pred)(parts.get(output) for output in names) if isinstance(parts, dict) else type(y_pred)(parts)

    def _flat(self, y_true: Any, y_pred: Any) -> Any:
        """Keras's own resolution: which loss, and which weight, for which output."""
        if self._resolved is None:
            resolved = CompileLoss(self.loss, self.loss_weights, output_names=self.output_names)
            try:
                resolved.build(y_true, y_pred)
            except (KeyError, ValueError, TypeError) as error:
                shown = self.loss if isinstance(self.loss, (str, list, tuple, dict)) else type(self.loss).__name__
                raise BadSettings(f"loss={shown!r} does not fit the model's outputs: {error}") from error
            self._resolved = resolved
        return self._resolved._flat_losses

    def _dtype(self, loss: Any, output: Any) -> Any:
        """A loss object computes in the precision it was made for, a name or a function in the model's."""
        by_user = any(loss is user_loss for user_loss in keras.tree.flatten(self.loss))
        return loss.dtype if by_user or not tf.is_tensor(output) else output.dtype.name


def _at(parts: Any, path: Sequence[Any], **missing: None) -> Any:
    """The part for one output, by its path in Keras's structure of outputs; or ``missing``."""
    for step in path:
        parts = parts.get(step) if missing and isinstance(parts, dict) else parts[step]
    return parts


def check_names(loss: Any) -> None:
    """Refuse names of losses that Keras does not have."""
    for name in keras.tree.flatten(loss):
        if isinstance(name, str) and name.lower() not in _BY_SHAPE and name not in ALL_OBJECTS_DICT:
            known = sorted(name for name in ALL_OBJECTS_DICT if name.islower() and len(name) > 4)
            raise BadSettings(f"loss={name!r}: Keras has no loss of this name. It has {', '.join(known)}")


def are_of_keras(loss: Any) -> bool:
    """Whether all are Keras's own losses, by name, as classes, functions or objects."""

    def is_of_keras(part: Any) -> bool:
        kind = part if isinstance(part, type) or inspect.isfunction(part) else type(part)
        return isinstance(part, str) or (kind is not LossFunctionWrapper and kind.__module__.startswith("keras.src."))

    return all(map(is_of_keras, keras.tree.flatten(loss)))


def of_whole_batch(loss: Any) -> str | None:
    """The name of a loss that is a ratio over all samples of a batch, if there is one."""
    for kind in (keras.losses.Dice, keras.losses.Tversky):
        for part in keras.tree.flatten(loss):
            if isinstance(part, kind) or part is kind or part in (kind.__name__, kind.__name__.lower()):
                return str(kind.__name__)
    return None


def losses_of(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any, dtype: Any) -> Losses:
    """One Keras loss of one output, reduced so that parts of a batch add up."""
    if type(loss).__call__ is not keras.losses.Loss.__call__:  # a reduction of its own
        weights = {} if sample_weight is None else {"sample_weight": sample_weight}
        return as_keras(loss(y_true, y_pred, **weights), name=loss.name)
    masks = [keras.src.backend.get_keras_mask(y_pred)] if tf.is_tensor(y_pred) else []
    y_pred, y_true = (
        keras.tree.map_structure(lambda leaf: keras.ops.convert_to_tensor(leaf, dtype), values)
        for values in (y_pred, y_true)
    )
    _check_shapes(loss, y_true, y_pred)
    values = loss.call(y_true, y_pred)
    name = loss.fn.__name__ if type(loss) is LossFunctionWrapper and hasattr(loss.fn, "__name__") else loss.name
    name = "the loss" if name == "<lambda>" else f"the loss {name}"
    if isinstance(values, LossSum) or not tf.is_tensor(values) or not values.shape.rank:
        if sample_weight is not None:
            gives = "a LossSum" if isinstance(values, LossSum) else "one number"
            raise BadSettings(
                f"the data have sample weights, but {name} gives {gives} for the whole batch: return one "
                "number per sample, and the trainer applies the weights; or write a training_step(batch), which is "
                "given the weights and returns mh.LossSum(total, count) with them in both"
            )
        return reduced(values, name=name)
    masks = [mask for mask in (*masks, keras.src.backend.get_keras_mask(values)) if mask is not None]
    mask = tf.logical_and(*(tf.cast(mask, tf.bool) for mask in masks)) if len(masks) == 2 else next(iter(masks), None)
    return _weighed(tf.cast(values, dtype), mask, sample_weight, loss.reduction)


def _check_shapes(loss: Any, y_true: Any, y_pred: Any) -> None:
    """Refuse to compare every output with every target, as TensorFlow does with shapes (4,) and (4, 4).

    As in Keras an axis of size 1 at the end may be missing.
    """
    if getattr(getattr(loss, "fn", None), "__name__", "") not in _PAIRING:
        return
    if not (tf.is_tensor(y_true) and tf.is_tensor(y_pred)) or None in (y_true.shape.rank, y_pred.shape.rank):
        return
    fewer, more = sorted((y_true.shape, y_pred.shape), key=lambda shape: shape.rank)
    rest = more[fewer.rank :].as_list()
    differ = any(None not in sizes and sizes[0] != sizes[1] for sizes in zip(fewer[1:], more[1:], strict=False))
    if differ or rest not in ([], [1]):
        raise refusals.unlike_target(y_pred.shape, y_true.shape)


def _weighed(values: Any, mask: Any, sample_weight: Any, reduction: str | None) -> Losses:
    """As ``keras.src.losses.loss.reduce_weighted_values``, but with sums and divisors where parts have to add up."""
    weight = None if sample_weight is None else tf.cast(sample_weight, values.dtype)
    if mask is not None:
        mask = tf.cast(mask, values.dtype)
        weight = apply_mask(weight, mask, values.dtype, "sum")
    if weight is not None:
        values, weight = squeeze_or_expand_to_same_rank(values, weight)
        values = values * weight
    if reduction in _UNREDUCED:
        return _unreduced(values)
    total = tf.reduce_sum(values)
    if reduction == "sum":
        return Losses(total=Total(total))
    if reduction == "mean_with_sample_weight" and weight is not None:
        return Losses(sums=(LossSum(total, tf.reduce_sum(weight)),))
    elements = tf.cast(tf.size(values), values.dtype)
    if mask is not None and reduction in _MEANS:
        per_entry = tf.math.divide_no_nan(elements, tf.cast(tf.size(mask), values.dtype))
        return Losses(sums=(LossSum(total, tf.reduce_sum(mask) * per_entry),))
    return Losses(tf.math.divide_no_nan(total, elements))


def as_keras(value: Any, *, name: str) -> Losses:
    """A loss as Keras takes it: a scalar, several numbers (Keras minimises their sum), or a LossSum."""
    several = tf.is_tensor(value) and bool(value.shape.rank)
    return _unreduced(_floating(value, name)) if several else reduced(value, name=name)


def _unreduced(values: Any) -> Losses:
    return Losses(total=Total(tf.reduce_sum(values), tf.size(values) // tf.maximum(tf.shape(values)[0], 1)))


def reduced(value: Any, *, name: str) -> Losses:
    """The value of a user's loss or step: a scalar, one number per sample (their mean is taken), or a LossSum."""
    if isinstance(value, LossSum):
        total = _floating(value.total, name)
        if total.shape.rank:
            raise BadSettings(
                f"{name} returned a LossSum whose total has shape {tuple(total.shape)}: a total is one number, "
                "tf.reduce_sum(...)"
            )
        count = tf.stop_gradient(tf.cast(value.count, total.dtype))
        return Losses(sums=(LossSum(total, count),), by_user=True)
    loss = _floating(value, name)
    if not loss.shape.rank:
        return Losses(loss)
    return Losses(tf.math.divide_no_nan(tf.reduce_sum(loss), tf.cast(tf.size(loss), loss.dtype)))


def _floating(value: Any, name: str) -> Any:
    if isinstance(value, keras.Variable):
        value = value.value
    if tf.is_tensor(value) and value.dtype.is_floating:
        return tf.convert_to_tensor(value)
    if tf.is_tensor(value):
        raise BadSettings(
            f"{name} returned whole numbers ({value.dtype.name}), which have no gradient: compute it from "
            "floating-point numbers"
        )
    raise refusals.not_a_loss(name, value)
