"""What a step minimises: the loss of a model and a batch, and the number of correct predictions if there are classes.

The loss sees the whole batch, on any number of devices, so it may be any function of it. A batch is a tuple (inputs...,
target), or a dict with the target among its entries. The entries of a dict go to the model by name where its
``__call__`` has arguments of these names. Otherwise a single entry is its one argument, and several are one dict::

    {"image": X, "label": y}                    __call__(self, x)                   model(X)
    {"tokens": X, "mask": M, "labels": y}       __call__(self, tokens, mask)        model(tokens=X, mask=M)
    {"left": A, "right": B, "target": y}        __call__(self, pair)                model({"left": A, "right": B})
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from manyhands.errors import BadBatch, BadSettings, ManyhandsError
from manyhands.training import refusals
from manyhands.training.data.labels import ClassLabels
from manyhands.training.data.roles import LABELS, input_count
from manyhands.training.loss.own_step import LossSum, call_step, is_default, step_name

Loss = Callable[[Any, Any], Any]
Batch = tuple[Any, ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # by position, and by name


def is_dict(batch: Batch) -> bool:
    """Whether the whole batch is a dict; sources hold it as a tuple of one."""
    return len(batch) == 1 and isinstance(batch[0], Mapping)


def as_given(batch: Batch) -> Any:
    """The batch as the user's data have it."""
    return batch[0] if is_dict(batch) else batch


def size_of(batch: Batch) -> int:
    return len(jax.tree.leaves(batch)[0])


def target_of(batch: Batch) -> Any:
    """The target; None where there is none."""
    if is_dict(batch):
        return next((batch[0][name] for name in LABELS if name in batch[0]), None)
    return batch[-1] if len(batch) > 1 else None


def needed_target(batch: Batch) -> Any:
    target = target_of(batch)
    if target is not None:
        return target
    if not is_dict(batch):
        raise refusals.no_target(batch)
    raise BadBatch(
        f"a batch is a dict of {', '.join(map(repr, batch[0]))}, and none of these is the target: call it 'label' (or "
        f"{', '.join(map(repr, (LABELS[0], *LABELS[2:])))}), or give the model a training_step(batch)"
    )


def arguments_of(model: Any, batch: Batch) -> Arguments:
    """What the model is called with for a batch with a target; of a dict also for one without."""
    return _by_name(model, batch[0]) if is_dict(batch) else (batch[:-1], {})


def _by_name(model: Any, entries: Mapping[str, Any]) -> Arguments:
    inputs = {name: value for name, value in entries.items() if name not in LABELS}
    call = type(getattr(model, "to_nnx__module", model)).__call__
    parameters = inspect.signature(call).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    by_name = {name: value for name, value in inputs.items() if name in parameters}
    if by_name:
        return (), inputs if takes_any else by_name
    return (next(iter(inputs.values())) if len(inputs) == 1 else inputs,), {}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossValue:
    """The loss of a batch: a mean, or (if the user's loss is a :class:`LossSum`) a sum and its divisor."""

    loss: jax.Array
    count: jax.Array | None
    correct: jax.Array | None
    output: Any = None  # the model's, where the objective knows it

    @property
    def mean(self) -> jax.Array:
        return self.loss if self.count is None else self.loss / self.count

    def plus(self, penalty: Any) -> LossValue:
        """With a term added to the mean."""
        return replace(self, loss=self.loss + penalty * (1 if self.count is None else self.count))


class Objective(Protocol):
    def __call__(self, model: nnx.Module, batch: Batch, *, training: bool) -> LossValue: ...

    def is_mean(self, model: nnx.Module) -> bool:
        """Whether the loss is known to be a mean over samples; any other loss gets batches of a documented size."""


@dataclass
class Supervised:
    """A loss of the model's output and the last part of the batch: ``loss(model(*inputs), target)``."""

    loss: Loss | None
    labels: ClassLabels | None = None  # learns from the first output how many classes there are

    def is_mean(self, model: nnx.Module) -> bool:
        return str(getattr(self.loss_of(model), "__module__", "")).startswith("manyhands.")

    def loss_of(self, model: nnx.Module) -> Loss:
        if self.loss is not None:
            return self.loss
        has_none = not hasattr(model, "training_step") or is_default(model, "loss")
        return cross_entropy if has_none else model.loss

    def __call__(self, model: nnx.Module, batch: Batch, *, training: bool) -> LossValue:
        target, loss = needed_target(batch), self.loss_of(model)
        output = output_of(model, *arguments_of(model, batch))
        if loss is cross_entropy and not (isinstance(output, jax.Array) and isinstance(target, jax.Array)):
            raise BadSettings(
                f"{type(model).__name__} answers with {refusals.in_words(output)}, the target is "
                f"{refusals.in_words(target)}, and the default loss, cross-entropy, takes class scores and classes: "
                "give the trainer loss="
            )
        if self.labels is not None:
            self.labels.learn(output.shape)
        correct = _correct(output, target, one_hot=loss is cross_entropy)
        return replace(_value(loss(output, target), "the loss", correct), output=output)


@dataclass(frozen=True)
class OwnStep:
    """A model with its own ``training_step(batch)``, which returns the mean loss or a :class:`LossSum`."""

    def is_mean(self, model: nnx.Module) -> bool:
        return False

    def __call__(self, model: nnx.Module, batch: Batch, *, training: bool) -> LossValue:
        name = step_name(model, training=training)
        value, accuracy = call_step(model, name, as_given(batch))
        correct = None if accuracy is None else jnp.round(accuracy * size_of(batch))
        return _value(value, f"{name} of {type(model).__name__}", correct)


def objective_for(model: nnx.Module, loss: Loss | None) -> Objective:
    is_own = hasattr(model, "training_step") and not is_default(model, "training_step")
    return OwnStep() if loss is None and is_own else Supervised(loss)


def cross_entropy(y_hat: jax.Array, y: jax.Array) -> jax.Array:
    """Of class scores and class numbers, or a number for each class (one-hot, or smoothed), for each sample."""
    if y.shape == y_hat.shape:
        return optax.losses.softmax_cross_entropy(y_hat, y)
    return optax.losses.softmax_cross_entropy_with_integer_labels(y_hat, y)


def predict(model: nnx.Module, batch: Batch) -> Any:
    """The model's output for a batch with a target, in full precision."""
    if is_dict(batch):
        return output_of(model, *arguments_of(model, batch))
    return output_of(model, batch[: input_count(call_of(model), len(batch))])


def output_of(model: nnx.Module, inputs: Batch, named: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The model's output in full precision. If it does not take such inputs, the error describes the user's data."""
    with explain_errors(model, inputs, named):
        return _widen(model(*inputs, **named))


def call_of(model: nnx.Module) -> Callable[..., Any]:
    return type(model).__call__.__get__(model)  # type: ignore[no-any-return]


@contextlib.contextmanager
def explain_errors(model: Any, inputs: Batch, named: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error of the model for these inputs into one that describes the user's data, or the model."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, (ManyhandsError, jax.errors.JAXTypeError)):
            raise
        raise BadBatch(_not_taken(model, inputs, named, error)) from error


def _name(model: Any) -> str:
    return type(getattr(model, "to_nnx__module", model)).__name__


def _not_taken(model: Any, inputs: Batch, named: Mapping[str, Any], error: Exception) -> str:
    name, reason = _name(model), next(iter(str(error).splitlines()), type(error).__name__)
    if "rngs" in reason:
        return (
            f"{name} does not draw random numbers of its own ({reason}): give them to its layers, "
            "nnx.Dropout(rate, rngs=rngs), and leave rngs out of __call__. The trainer saves and resumes them"
        )
    try:
        inspect.signature(model).bind(*inputs, **named)
    except TypeError:
        return (
            f"a batch has {len(inputs) + 1} parts, (inputs..., target), and {name} does not take {len(inputs)} of them "
            f"as inputs ({reason}). Weights of samples, or several targets, need a training_step(batch) of the model: "
            "it takes all parts, and returns the mean loss or mh.LossSum(total, count)"
        )
    return str(refusals.not_taken(model, [part.shape[1:] for part in jax.tree.leaves((inputs, dict(named)))], error))


def _value(value: Any, name: str, correct: jax.Array | None) -> LossValue:
    """The value that the user's code returned: a mean, numbers for each sample, or a sum with its count."""
    if isinstance(value, LossSum):
        total, count = _widen(value.total), jnp.asarray(value.count)
        if getattr(total, "shape", None) != () or count.ndim:
            raise BadSettings(
                f"{name} returned a LossSum of {refusals.in_words(value.total)} and {refusals.in_words(value.count)}: "
                "total has to be an array of one number without dimensions, count too, or a plain number"
            )
        return LossValue(total, jax.lax.stop_gradient(count).astype(total.dtype), correct)
    if not isinstance(value, jax.Array):
        raise refusals.not_a_loss(name, value)
    return LossValue(_mean(_widen(value)), None, correct)


def _mean(value: jax.Array) -> jax.Array:
    """The mean over samples of a loss that is one number, or one or more numbers per sample."""
    return value.reshape(len(value), -1).sum(1).mean() if value.ndim else value


def _widen(output: Any) -> Any:
    """The loss is computed in full precision, whatever the model computes in."""

    def widen_leaf(leaf: Any) -> Any:
        narrow = getattr(leaf, "dtype", None) in (jnp.bfloat16, jnp.float16)
        return leaf.astype(jnp.float32) if narrow else leaf

    return jax.tree.map(widen_leaf, output)


def _correct(output: Any, target: Any, *, one_hot: bool) -> jax.Array | None:
    """How many rows of class scores are largest at the target; None if these are not class scores.

    ``one_hot``: a target with a number for each class means the class of the largest.
    """
    if one_hot and target.shape == output.shape:
        target = target.argmax(-1)
    shapes = getattr(output, "ndim", 0), getattr(target, "ndim", 0)
    if shapes != (2, 1) or not jnp.issubdtype(target.dtype, jnp.integer):
        return None
    return (output.argmax(1) == target).sum()
