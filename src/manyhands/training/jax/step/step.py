"""One step as one compiled program over all devices: gather, forward, backward, clip, update, average and sums.

The program is written for the whole batch, as for one device; the batch is divided over the devices, the parameters are
everywhere, and XLA adds the communication. So the update is that of one device whatever the loss, statistics of
normalisation are over the whole batch, and dropout draws the same numbers on any number of devices.

Where the data live on the devices, so do the order of the epoch and the place in it: nothing is sent but the factor of
the learning rate. What changes from step to step is donated to the program, which writes the new values
into the same memory. There is a program for each size of batch: the usual one and the short last one of an epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from manyhands.training.jax import batches, linen
from manyhands.training.jax import skeleton as models
from manyhands.training.jax.batches import Batch
from manyhands.training.jax.objective import Objective, Rows, output_of, predicted
from manyhands.training.jax.skeleton import Skeleton
from manyhands.training.jax.step import running_sums
from manyhands.training.jax.step.accumulation import Sum, accumulated
from manyhands.training.jax.step.division import Division
from manyhands.training.jax.step.masking import counting_only
from manyhands.training.jax.step.running_sums import Sums
from manyhands.training.jax.world import World
from manyhands.training.settings import Settings

# A job's numbers: "parameters", "random" and "rest" of the model, "optimizer", AVERAGES of the parameters and of the
# rest where they are kept, and "at": where in the epoch's order the job stands, and the number of the step.
State = dict[str, Any]
AVERAGES = {"average": "parameters", "average_of_rest": "rest"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Resident:
    """A batch of data that live on the devices: the next one in the epoch's order, or the samples from ``start`` on."""

    arrays: Batch
    order: jax.Array | None = None
    start: jax.Array | None = None


StepInput = Batch | Resident  # the rows of a batch as they were sent, or where on the devices they are


@dataclass
class Steps:
    """The programs of a job, each compiled when it is first needed."""

    skeleton: Skeleton
    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs
    world: World
    dtype: Any  # what layers compute in; None: in that of their parameters
    settings: Settings
    counts_correct: bool = False  # whether there is an accuracy; known once a program is traced
    tests_count_correct: bool = False  # the same of evaluations

    decay: float | None = None  # of the moving average of the weights; None: there is none

    def __post_init__(self) -> None:
        self._programs: dict[Any, Callable[..., Any]] = {}

    # What the learner calls

    def train(self, state: State, so_far: Sums, factor: Any, rows: StepInput, division: Division, prepare: Any) -> Any:
        """The state and the sums after one step."""
        return self._program(self._train, division, prepare, donated=True)(state, so_far, factor, rows)

    def test(
        self, state: State, so_far: Sums, rows: StepInput, division: Division, prepare: Any, *, with_outputs: bool
    ) -> tuple[Sums, Any]:
        """The sums with the figures of a batch; and, ``with_outputs``, the model's outputs and the targets."""
        program = self._program(self._test, division, prepare, with_outputs=with_outputs)
        return program(_numbers(state), so_far, rows)  # type: ignore[no-any-return]

    def predict(self, state: State, rows: Batch, division: Division, prepare: Any) -> Any:
        """The model's outputs for a batch; ``prepare`` returns its inputs alone."""
        return self._program(self._predict, division, prepare)(_numbers(state), rows)

    def _program(
        self, method: Callable[..., Any], division: Division, prepare: Any, *, donated: bool = False, **options: bool
    ) -> Callable[..., Any]:
        key = (method.__name__, division.size, len(division.places), prepare, *options.values())
        if key not in self._programs:
            function = functools.partial(method, division=division, prepare=prepare, **options)
            self._programs[key] = jax.jit(
                function, donate_argnums=0 if donated else (), out_shardings=self.world.everywhere
            )
        return self._programs[key]

    # The programs

    def _train(
        self, state: State, so_far: Sums, factor: Any, rows: StepInput, *, division: Division, prepare: Any
    ) -> Any:
        if not isinstance(rows, Resident):

            def batch_of(part: Any) -> Batch:
                return prepare(self.world.divided(part))  # type: ignore[no-any-return]

            return self._update(state, so_far, factor, self._real(rows, division), batch_of, division)

        numbers = jax.lax.dynamic_slice_in_dim(rows.order, state["at"][0], division.size)
        if division.weights is not None:
            numbers = numbers[division.places]

        def gathered(numbers: Any) -> Batch:
            return prepare(self.world.divided(_gathered(rows.arrays, self.world.divided(numbers))))  # type: ignore[no-any-return]

        return self._update(state, so_far, factor, numbers, gathered, division)

    def _test(
        self, numbers: Any, so_far: Sums, rows: StepInput, *, division: Division, prepare: Any, with_outputs: bool
    ) -> tuple[Sums, Any]:
        model = self._evaluating(numbers)
        batch = _as_parameters(prepare(self._real(rows, division)), numbers["parameters"])
        value = self.objective(model, batch, None, training=False)
        self.tests_count_correct = value.correct is not None
        so_far = running_sums.add(so_far, value.loss, value.correct, division.size, divisor=value.count)
        if not with_outputs:
            return so_far, None
        # The model's own step does not return its output.
        output = predicted(self._evaluating(numbers), batch) if value.output is None else value.output
        return so_far, (output, batches.target_of(batch))

    def _predict(self, numbers: Any, rows: Batch, *, division: Division, prepare: Any) -> Any:
        batch = _as_parameters(prepare(self._real(rows, division)), numbers["parameters"])
        model = self._evaluating(numbers)
        return predicted(model, batch) if batches.is_dict(batch) else output_of(model, batch)

    def _real(self, rows: StepInput, division: Division) -> Batch:
        """The rows of a batch, without those at the end that only fill up the last device's part."""
        if isinstance(rows, Resident):
            real = tuple(jax.lax.dynamic_slice_in_dim(array, rows.start, division.size) for array in rows.arrays)
        else:
            real = rows if division.weights is not None else tuple(part[: division.size] for part in rows)
        divided: Batch = self.world.divided(real)
        return divided

    def _update(
        self, state: State, so_far: Sums, factor: Any, rows: Any, batch_of: Callable[[Any], Batch], division: Division
    ) -> tuple[State, Sums]:
        """``batch_of`` makes a batch of ``rows``: its samples, or their numbers."""
        before = state["parameters"]
        if self.settings.step.accumulate > 1:
            loss, numbers, correct, gradients = self._in_micro_batches(state, rows, batch_of, division)
        else:
            loss_of = jax.value_and_grad(self._loss, has_aux=True)
            batch = batch_of(rows)
            (loss, (numbers, value)), gradients = loss_of(
                before, state["random"], state["rest"], batch, division.weights
            )
            correct = value.correct
        if clip := self.settings.gradient_clip_val:
            scale = clip / jnp.maximum(optax.global_norm(gradients), clip)
            gradients = jax.tree.map(lambda gradient: gradient * scale, gradients)
        updates, optimizer = self.optimizer.update(gradients, state["optimizer"], before, value=loss)
        # The whole update is multiplied, weight decay too where it is part of it: as if the rate were another one.
        updates = jax.tree.map(lambda update: (update * factor).astype(update.dtype), updates)
        after = {**numbers, "parameters": optax.apply_updates(before, updates), "optimizer": optimizer}
        if self.decay is not None:
            for average, part in AVERAGES.items():
                if average in state:
                    after[average] = jax.tree.map(self._averaged, state[average], after[part])
        if self.settings.step.on_nan == "continue":  # a batch whose loss is NaN changes nothing
            good = jnp.isfinite(loss)
            after = {name: _chosen(good, after[name], state[name]) for name in after}
        position, step = state["at"]
        so_far = running_sums.add(so_far, loss, correct, division.size, step)
        return {**after, "at": jnp.stack([position + division.size, step + 1])}, so_far

    def _averaged(self, average: jax.Array, weight: jax.Array) -> jax.Array:
        if not jnp.issubdtype(average.dtype, jnp.inexact):
            return weight
        weight = weight.astype(average.dtype)
        moved = average + (weight - average) * (1 - self.decay)  # type: ignore[operator]
        return jnp.where(average == weight, weight, moved)  # infinity, as in a mask, stays

    def _in_micro_batches(
        self, state: State, rows: Any, batch_of: Callable[[Any], Batch], division: Division
    ) -> tuple[Any, Any, Any, Any]:
        """Loss, numbers, correct predictions and gradients of a batch that is processed in parts."""

        def total_of(parameters: Any, batch: Batch, numbers: Any, samples: Rows | None) -> tuple[Any, Any]:
            _, (after, value) = self._loss(parameters, numbers["random"], numbers["rest"], batch, samples)
            size = batches.rows(batch) if samples is None else int(samples.sum())
            total = value.loss * size if value.count is None else value.loss
            count = jnp.asarray(size if value.count is None else value.count, total.dtype)
            return total, (count, after, jnp.zeros((), jnp.int32) if value.correct is None else value.correct)

        def work(rows: Any, numbers: Any, samples: Rows | None) -> Sum:
            of_sum = jax.value_and_grad(total_of, has_aux=True)
            (total, (count, after, correct)), gradients = of_sum(state["parameters"], batch_of(rows), numbers, samples)
            return Sum(total, count, correct, gradients, after)

        numbers = {part: state[part] for part in ("random", "rest")}
        whole = accumulated(work, rows, numbers, division, self.settings.step.accumulate)
        gradients = jax.tree.map(lambda gradient: gradient / whole.count.astype(gradient.dtype), whole.gradients)
        return whole.total / whole.count, whole.numbers, whole.correct, gradients

    def _loss(
        self, parameters: Any, random: Any, rest: Any, batch: Batch, samples: Rows | None
    ) -> tuple[jax.Array, Any]:
        model = self.skeleton.model({"parameters": parameters, "random": random, "rest": rest})
        model = counting_only(models.training(model, self.skeleton), samples)
        if self.dtype is not None:
            models.computing_in(model, self.dtype, statistics=True)
        value = self.objective(model, _as_parameters(batch, parameters), samples, training=True)
        value = value.plus(linen.sown_losses(model, in_parts=self.settings.step.accumulate > 1))
        self.counts_correct = value.correct is not None
        numbers = self.skeleton.numbers(model)
        return value.mean, ({"random": numbers["random"], "rest": numbers["rest"]}, value)

    def _evaluating(self, numbers: Any) -> Any:
        model = models.evaluating(self.skeleton.model(numbers))
        return model if self.dtype is None else models.computing_in(model, self.dtype, statistics=False)


def _numbers(state: State) -> State:
    """The model's numbers in the state of a job."""
    return {part: state[part] for part in models.PARTS}


def _gathered(arrays: Batch, numbers: jax.Array) -> Batch:
    return tuple(array.at[numbers].get(mode="promise_in_bounds") for array in arrays)


def _as_parameters(batch: Batch, parameters: Any) -> Batch:
    """Floating-point inputs in double precision, where the parameters are."""
    double = any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(parameters))

    def widened(part: jax.Array) -> jax.Array:
        return part.astype(jnp.float64) if double and jnp.issubdtype(part.dtype, jnp.floating) else part

    widened_batch: Batch = jax.tree.map(widened, batch)
    return widened_batch


def _chosen(good: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda after, before: jnp.where(good, after, before), new, old)
