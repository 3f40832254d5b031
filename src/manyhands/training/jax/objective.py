"""What a step minimises: from a model and a batch to a loss, and to the number of right answers where there is one.

The batch is the whole one, on however many devices it lies: a loss may be any function of it. Only where shares are
uneven (:mod:`.division`) rows have weights, and the loss must then be a mean over samples; it is taken one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from manyhands.errors import BadBatch, BadSettings
from manyhands.training.jax.book import Module, cross_entropy

Batch = tuple[Any, ...]
Loss = Callable[[Any, Any], jax.Array]

_CLOSE = 1e-3


class Objective(Protocol):
    def __call__(
        self, model: nnx.Module, batch: Batch, weights: jax.Array | None, *, training: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """The loss as a mean over the samples that count, and how many of them were answered rightly."""


@dataclass(frozen=True)
class Supervised:
    """A loss of the model's answer and the last part of the batch: ``loss(model(*inputs), target)``.

    Without a loss it is the model's own, or cross-entropy where it has none.
    """

    loss: Loss | None

    def loss_of(self, model: nnx.Module) -> Loss:
        if self.loss is not None:
            return self.loss
        return cross_entropy if has_default_loss(model) else model.loss

    def __call__(
        self, model: nnx.Module, batch: Batch, weights: jax.Array | None, *, training: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        if len(batch) < 2:
            raise BadBatch(
                "a batch (inputs, target) is needed, this one has one part: give both, or a model with a "
                "training_step(batch) of its own"
            )
        answer, target, loss = _widened(model(*batch[:-1])), batch[-1], self.loss_of(model)
        if weights is None:
            return _mean(loss(answer, target)), _right(answer, target, None)
        losses = jnp.where(weights, one_by_one(loss, answer, target), 0)
        return losses.sum() / weights.sum(), _right(answer, target, weights)


@dataclass(frozen=True)
class OwnStep:
    """A model that says itself what a step is: ``training_step(batch)`` gives the mean loss."""

    def __call__(
        self, model: nnx.Module, batch: Batch, weights: jax.Array | None, *, training: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        step = model.training_step if training else getattr(model, "validation_step", model.training_step)
        return _mean(_widened(step(batch))), None


def objective_for(model: nnx.Module, loss: Loss | None) -> Objective:
    own_step = (
        hasattr(model, "training_step") and getattr(type(model), "training_step", None) is not Module.training_step
    )
    return OwnStep() if loss is None and own_step else Supervised(loss)


def has_default_loss(model: nnx.Module) -> bool:
    return not isinstance(model, Module) or type(model).loss is Module.loss


def check_shares(objective: Objective, make: Callable[[], nnx.Module], few: Callable[[], Batch | None]) -> None:
    """Refuse a loss that is no mean over samples where rows have weights: it would train another model.

    ``make`` makes the model, in evaluation mode; ``few`` gives some samples.
    """
    if not isinstance(objective, Supervised):
        raise BadSettings(
            "uneven shares divide the loss by samples, and this model's training_step(batch) gives only that of a "
            "whole batch: leave shares away, or give the trainer a loss(answer, target)"
        )
    if objective.loss_of(make()) is cross_entropy or (batch := few()) is None:
        return

    def both(batch: Batch) -> tuple[jax.Array, jax.Array]:
        model = make()
        answer, target, loss = _widened(model(*batch[:-1])), batch[-1], objective.loss_of(model)
        return _mean(loss(answer, target)), one_by_one(loss, answer, target).mean()

    whole, parts = map(float, jax.jit(both)(batch))
    if not np.isclose(whole, parts, rtol=_CLOSE, atol=_CLOSE * _CLOSE) and np.isfinite(whole):
        raise BadSettings(
            f"the loss of {len(batch[-1])} samples is {whole:.6g}, but {parts:.6g} on average if each is taken alone: "
            "with uneven shares this loss would train another model than one device does. It must be the mean over "
            "the samples of the batch; or leave shares away, then it may be anything"
        )


def one_by_one(loss: Loss, answer: Any, target: Any) -> jax.Array:
    """The loss of every sample; one that gives a mean is asked about each alone."""
    size = len(target)
    shape = jax.eval_shape(loss, answer, target).shape
    if shape[:1] == (size,):
        return loss(answer, target).reshape(size, -1).sum(1)
    alone = jax.vmap(lambda one, wanted: loss(_batch_of_one(one), _batch_of_one(wanted)))
    losses: jax.Array = alone(answer, target)
    return losses


def _batch_of_one(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _mean(value: jax.Array) -> jax.Array:
    """The mean over samples, of a loss that gives one number or one (or more) per sample."""
    return value.reshape(len(value), -1).sum(1).mean() if value.ndim else value


def _widened(answer: Any) -> Any:
    """The loss is computed in full precision, whatever the model computes in."""

    def widened(leaf: Any) -> Any:
        narrow = leaf.dtype in (jnp.bfloat16, jnp.float16)
        return leaf.astype(jnp.float32) if narrow else leaf

    return jax.tree.map(widened, answer)


def _right(answer: Any, target: Any, weights: jax.Array | None) -> jax.Array | None:
    """How many rows of class scores have their largest at the target; None where that has no meaning."""
    if getattr(answer, "ndim", 0) != 2 or target.ndim != 1 or not jnp.issubdtype(target.dtype, jnp.integer):
        return None
    right = answer.argmax(1) == target
    return (right if weights is None else right & weights).sum()
