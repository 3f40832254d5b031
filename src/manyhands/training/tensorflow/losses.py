"""Keras's losses, reduced so that the parts of a batch add up.

Keras reduces the losses of a batch to a mean. On several devices, or with ``accumulate``, each part of a batch has a
mean of its own, and those can be put together only if it is known what each was divided by. So the losses are reduced
here: to a mean over samples, where the divisor grows with the number of samples alone, else to a sum and its divisor
(:class:`~manyhands.training.loss.own_step.LossSum`). The second is needed where tokens are masked, where labels of
``ignore_class`` are left out, and for ``reduction="mean_with_sample_weight"``. Six tokens of which five count on one
device and six of which two count on the other: (a + b) / 7, not the mean of a / 5 and b / 2.

Losses are resolved and called as Keras does it: ``loss(y_true, y_pred)``, by name, as a class, an object or a function,
one for each output, with ``loss_weights``. Losses that are no mean over samples (``reduction="sum"`` and ``None``, a
``__call__`` of their own, a Dice over the batch) are refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import ALL_OBJECTS_DICT
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.compile_utils import CompileLoss

from manyhands.errors import BadSettings, ManyhandsError
from manyhands.training import refusals
from manyhands.training.loss.own_step import LossSum

_BY_SHAPE = ("crossentropy", "ce")  # Keras chooses among three by the shapes of targets and outputs
_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_RATIOS = ("Dice", "Tversky")
_NOTHING = 1e-30  # added to the counts of masks: where nothing counts, the loss is 0 as in Keras, and not NaN
# Functions of Keras that compare each number of the output with one of the target.
_PAIRING = {"mean_squared_error", "mean_absolute_error", "mean_absolute_percentage_error", "huber", "log_cosh"}
_PAIRING |= {"mean_squared_logarithmic_error", "binary_crossentropy", "binary_focal_crossentropy", "poisson"}


@dataclass(frozen=True)
class Losses:
    """The loss of a part of a batch: a mean over its samples, plus sums that are divided once all parts are known."""

    mean: Any = None
    sums: tuple[LossSum, ...] = ()
    correct: Any = None  # how many samples were predicted correctly, where that has a meaning
    output: Any = None  # the model's, and the targets, where the objective knows them
    targets: Any = None

    def __add__(self, other: Losses) -> Losses:
        means = [losses.mean for losses in (self, other) if losses.mean is not None]
        mean = tf.add_n([tf.cast(value, means[0].dtype) for value in means]) if means else None
        return replace(self, mean=mean, sums=self.sums + other.sums)

    def __mul__(self, weight: float) -> Losses:
        mean = None if self.mean is None else self.mean * weight
        return replace(self, mean=mean, sums=tuple(LossSum(part.total * weight, part.count) for part in self.sums))


class KerasLoss(CompileLoss):  # type: ignore[misc]
    """The user's ``loss``, of the trainer or of ``model.compile``: Keras finds the loss, the weight, the target and
    the sample weights of each output. The losses are then reduced here.
    """

    def __init__(self, loss: Any, loss_weights: Any = None, output_names: Sequence[str] | None = None) -> None:
        super().__init__(loss, loss_weights, output_names=output_names)
        check(loss)
        self._flat_losses: list[Any] | None = None
        self._losses: list[Losses] = []

    def build(self, y_true: Any, y_pred: Any) -> None:
        super().build(y_true, y_pred)
        self._flat_losses = [
            part._replace(loss=functools.partial(self._add, part.loss, part.loss_weights), loss_weights=None)
            for part in self._flat_losses or ()
        ]
        self._metrics[:] = [None] * len(self._flat_losses)

    def _add(self, loss: Any, weight: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        """Keras calls this for each output, and adds up what it returns."""
        # In the wider of two precisions: what the object was made for (float32 if it does not say), and the model's.
        dtype = keras.backend.result_type(loss.dtype, y_pred.dtype) if tf.is_tensor(y_pred) else loss.dtype
        losses = losses_of(loss, y_true, y_pred, sample_weight, dtype)
        self._losses.append(losses if weight is None else losses * weight)
        return tf.zeros(())

    def losses(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Losses:
        self._losses = []
        try:
            self(y_true, y_pred, sample_weight)
        except ManyhandsError:
            raise
        except (KeyError, ValueError, TypeError) as error:
            raise BadSettings(f"the loss does not fit the model's outputs and targets: {error}") from error
        return sum(self._losses, Losses())


def check(loss: Any) -> None:
    """Refuse names that Keras does not have, and losses that are no mean over samples."""
    for part in keras.tree.flatten(loss):
        if isinstance(part, str) and part.lower() not in _BY_SHAPE and part not in ALL_OBJECTS_DICT:
            known = sorted(name for name in ALL_OBJECTS_DICT if name.islower() and len(name) > 4)
            raise BadSettings(f"loss={part!r}: Keras has no loss of this name. It has {', '.join(known)}")
        name = (part if isinstance(part, str) else getattr(part, "__name__", type(part).__name__)).capitalize()
        if name in _RATIOS and are_of_keras(part) and getattr(part, "axis", None) is None:
            raise BadSettings(
                f"{name} of Keras is one ratio over all samples of a batch: give it the axes of a sample, as "
                f"keras.losses.{name}(axis=(1, 2, 3)) for images"
            )
        if isinstance(part, keras.losses.Loss) and part.reduction not in _MEANS:
            raise BadSettings(
                f"the loss {part.name} has reduction={part.reduction!r}, and the trainer minimises means, which do not "
                "depend on the size of a batch: leave reduction= out"
            )
        if isinstance(part, keras.losses.Loss) and type(part).__call__ is not keras.losses.Loss.__call__:
            raise BadSettings(
                f"{type(part).__name__} has a __call__ of its own: write call(self, y_true, y_pred) instead, which "
                "returns one number per sample"
            )


def are_of_keras(loss: Any) -> bool:
    """Whether all are Keras's own losses, by name, as classes, functions or objects."""

    def is_of_keras(part: Any) -> bool:
        kind = part if isinstance(part, type) or inspect.isfunction(part) else type(part)
        return isinstance(part, str) or (kind is not LossFunctionWrapper and kind.__module__.startswith("keras.src."))

    return all(map(is_of_keras, keras.tree.flatten(loss)))


def losses_of(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any, dtype: Any) -> Losses:
    """One Keras loss of one output, reduced so that parts of a batch add up."""
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
        return reduce_values(values, name=name)
    masks = [mask for mask in (*masks, keras.src.backend.get_keras_mask(values)) if mask is not None]
    mask = tf.logical_and(*(tf.cast(mask, tf.bool) for mask in masks)) if len(masks) == 2 else next(iter(masks), None)
    return _weigh(tf.cast(values, dtype), mask, sample_weight, loss.reduction)


def _check_shapes(loss: Any, y_true: Any, y_pred: Any) -> None:
    """Refuse to compare every output with every target, as TensorFlow does with shapes (4,) and (4, 4).

    As in Keras an axis of size 1 at the end may be missing.
    """
    if getattr(getattr(loss, "fn", None), "__name__", "") not in _PAIRING or not tf.is_tensor(y_pred):
        return
    if None in (y_true.shape.rank, y_pred.shape.rank):
        return
    shapes = [values.shape[1:].as_list() for values in (y_true, y_pred)]
    true, predicted = ([*shape, 1] if len(shape) < max(map(len, shapes)) else shape for shape in shapes)
    pairs = zip(true, predicted, strict=False)
    if len(true) != len(predicted) or any(None not in pair and pair[0] != pair[1] for pair in pairs):
        raise refusals.unlike_target(y_pred.shape, y_true.shape)


def _weigh(values: Any, mask: Any, sample_weight: Any, reduction: str) -> Losses:
    """As ``keras.src.losses.loss.reduce_weighted_values``, but with sums and divisors where parts have to add up."""
    weight = None if sample_weight is None else tf.cast(sample_weight, values.dtype)
    if mask is not None:
        mask = tf.cast(mask, values.dtype)
        weight = apply_mask(weight, mask, values.dtype, "sum")
    if weight is not None:
        values, weight = squeeze_or_expand_to_same_rank(values, weight)
        values = values * weight
    total, elements = tf.reduce_sum(values), tf.cast(tf.size(values), values.dtype)
    if reduction == "mean_with_sample_weight" and weight is not None:
        return Losses(sums=(LossSum(total, tf.reduce_sum(weight) + _NOTHING),))
    if mask is not None:
        per_entry = tf.math.divide_no_nan(elements, tf.cast(tf.size(mask), values.dtype))
        return Losses(sums=(LossSum(total, tf.reduce_sum(mask) * per_entry + _NOTHING),))
    return Losses(tf.math.divide_no_nan(total, elements))


def reduce_values(value: Any, *, name: str) -> Losses:
    """The value of a user's loss or step: a scalar, one number per sample (their mean is taken), or a LossSum."""
    if isinstance(value, LossSum):
        total = _as_floating(value.total, name)
        if total.shape.rank:
            shape = tuple(total.shape)
            raise BadSettings(f"{name} returned a LossSum whose total has shape {shape}: give tf.reduce_sum(...)")
        return Losses(sums=(LossSum(total, tf.stop_gradient(tf.cast(value.count, total.dtype))),))
    loss = _as_floating(value, name)
    if not loss.shape.rank:
        return Losses(loss)
    return Losses(tf.math.divide_no_nan(tf.reduce_sum(loss), tf.cast(tf.size(loss), loss.dtype)))


def _as_floating(value: Any, name: str) -> Any:
    if isinstance(value, keras.Variable):
        value = value.value
    if tf.is_tensor(value) and value.dtype.is_floating:
        return tf.convert_to_tensor(value)
    if tf.is_tensor(value):
        raise BadSettings(f"{name} returned whole numbers ({value.dtype.name}), which have no gradient")
    raise refusals.not_a_loss(name, value)
