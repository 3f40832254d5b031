"""One step as one compiled program over all devices: gather, forward, backward, clip, update, average and sums.

The program is written for the whole batch, as for one device; the batch is divided over the devices, the parameters are
everywhere, and XLA adds the communication. So the update is that of one device whatever the loss, statistics of
normalisation are over the whole batch, and dropout draws the same numbers on any number of devices.

Where the data live on the devices, so do the order of the epoch and the place in it: nothing is sent but the factor of
the learning rate. What changes from step to step is donated to the program, which writes the new values
into the same memory. There is a program for each size of batch: the usual one and the short last one of an epoch.

Gradient accumulation is a batch in micro-batches, one after the other, for the update of the whole batch.

The loss of a micro-batch is a mean over its samples, or a sum and its count; sums and counts are added up, and so are
the gradients of the sums. Ten samples with ``accumulate=3`` are micro-batches of 4, 4 and 2::

    total       4 a + 4 b + 2 c        a, b, c: the mean losses
    count       4 + 4 + 2
    loss        total / count          the mean over all ten

Micro-batches of equal size are one loop of the compiled program (``lax.scan``), so activations of only one of them are
in memory; a shorter last one follows it. A micro-batch takes every k-th row of the batch, so that each device has a
part of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from manyhands.training.jax import linen
from manyhands.training.jax import skeleton as models
from manyhands.training.jax.objective import Batch, Objective, is_dict, output_of, predict, size_of, target_of
from manyhands.training.jax.skeleton import Skeleton
from manyhands.training.jax.world import World
from manyhands.training.options import Settings
from manyhands.training.running_sums import Totals

Sums = dict[str, Any]
_NEVER = 2**31 - 1  # the first bad step, as long as there is none

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
class Programs:
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

    def train(self, state: State, so_far: Sums, factor: Any, rows: StepInput, size: int, prepare: Any) -> Any:
        """The state and the sums after one step, of a batch of that size."""
        return self._program(self._train, size, prepare, donated=True)(state, so_far, factor, rows)

    def test(
        self, state: State, so_far: Sums, rows: StepInput, size: int, prepare: Any, *, with_outputs: bool
    ) -> tuple[Sums, Any]:
        """The sums with the totals of a batch; and, ``with_outputs``, the model's outputs and the targets."""
        program = self._program(self._test, size, prepare, with_outputs=with_outputs)
        return program(_numbers(state), so_far, rows)  # type: ignore[no-any-return]

    def predict(self, state: State, rows: Batch, size: int, prepare: Any) -> Any:
        """The model's outputs for a batch; ``prepare`` returns its inputs alone."""
        return self._program(self._predict, size, prepare)(_numbers(state), rows)

    def _program(
        self, method: Callable[..., Any], size: int, prepare: Any, *, donated: bool = False, **options: bool
    ) -> Callable[..., Any]:
        key = (method.__name__, size, prepare, *options.values())
        if key not in self._programs:
            function = functools.partial(method, size=size, prepare=prepare, **options)
            self._programs[key] = jax.jit(
                function, donate_argnums=0 if donated else (), out_shardings=self.world.everywhere
            )
        return self._programs[key]

    # The programs

    def _train(self, state: State, so_far: Sums, factor: Any, rows: StepInput, *, size: int, prepare: Any) -> Any:
        if not isinstance(rows, Resident):

            def batch_of(part: Any) -> Batch:
                return prepare(self.world.divide(part))  # type: ignore[no-any-return]

            return self._update(state, so_far, factor, self._real(rows, size), batch_of, size)

        numbers = jax.lax.dynamic_slice_in_dim(rows.order, state["at"][0], size)

        def gather(numbers: Any) -> Batch:
            return prepare(self.world.divide(_gather_rows(rows.arrays, self.world.divide(numbers))))  # type: ignore[no-any-return]

        return self._update(state, so_far, factor, numbers, gather, size)

    def _test(
        self, numbers: Any, so_far: Sums, rows: StepInput, *, size: int, prepare: Any, with_outputs: bool
    ) -> tuple[Sums, Any]:
        model = self._evaluate(numbers)
        batch = _as_parameters(prepare(self._real(rows, size)), numbers["parameters"])
        value = self.objective(model, batch, training=False)
        self.tests_count_correct = value.correct is not None
        so_far = add_batch(so_far, value.loss, value.correct, size, divisor=value.count)
        if not with_outputs:
            return so_far, None
        # The model's own step does not return its output.
        output = predict(self._evaluate(numbers), batch) if value.output is None else value.output
        return so_far, (output, target_of(batch))

    def _predict(self, numbers: Any, rows: Batch, *, size: int, prepare: Any) -> Any:
        batch = _as_parameters(prepare(self._real(rows, size)), numbers["parameters"])
        model = self._evaluate(numbers)
        return predict(model, batch) if is_dict(batch) else output_of(model, batch)

    def _real(self, rows: StepInput, size: int) -> Batch:
        """The rows of a batch, without those at the end that only fill up the last device's part."""
        if isinstance(rows, Resident):
            real = tuple(jax.lax.dynamic_slice_in_dim(array, rows.start, size) for array in rows.arrays)
        else:
            real = tuple(part[:size] for part in rows)
        divided: Batch = self.world.divide(real)
        return divided

    def _update(
        self, state: State, so_far: Sums, factor: Any, rows: Any, batch_of: Callable[[Any], Batch], size: int
    ) -> tuple[State, Sums]:
        """``batch_of`` makes a batch of ``rows``: its samples, or their numbers."""
        before = state["parameters"]
        if self.settings.step.accumulate > 1:
            loss, numbers, correct, gradients = self._in_micro_batches(state, rows, batch_of)
        else:
            loss_of = jax.value_and_grad(self._loss, has_aux=True)
            (loss, (numbers, value)), gradients = loss_of(before, state["random"], state["rest"], batch_of(rows))
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
                    after[average] = jax.tree.map(self._average, state[average], after[part])
        if self.settings.step.on_nan == "continue":  # a batch whose loss is NaN changes nothing
            choose = functools.partial(jnp.where, jnp.isfinite(loss))
            after = {name: jax.tree.map(choose, after[name], state[name]) for name in after}
        position, step = state["at"]
        so_far = add_batch(so_far, loss, correct, size, step)
        return {**after, "at": jnp.stack([position + size, step + 1])}, so_far

    def _average(self, average: jax.Array, weight: jax.Array) -> jax.Array:
        if not jnp.issubdtype(average.dtype, jnp.inexact):
            return weight
        moved = average + (weight - average) * (1 - self.decay)  # type: ignore[operator]
        return jnp.where(average == weight, weight, moved)  # infinity, as in a mask, stays

    def _in_micro_batches(self, state: State, rows: Any, batch_of: Callable[[Any], Batch]) -> tuple[Any, Any, Any, Any]:
        """Loss, numbers, correct predictions and gradients of a batch that is processed in parts."""

        def total_of(parameters: Any, batch: Batch, numbers: Any) -> tuple[Any, Any]:
            _, (after, value) = self._loss(parameters, numbers["random"], numbers["rest"], batch)
            size = size_of(batch)
            total = value.loss * size if value.count is None else value.loss
            count = jnp.asarray(size if value.count is None else value.count, total.dtype)
            return total, (count, after, jnp.zeros((), jnp.int32) if value.correct is None else value.correct)

        def work(rows: Any, numbers: Any) -> MicroBatchSum:
            of_sum = jax.value_and_grad(total_of, has_aux=True)
            (total, (count, after, correct)), gradients = of_sum(state["parameters"], batch_of(rows), numbers)
            return MicroBatchSum(total, count, correct, gradients, after)

        numbers = {part: state[part] for part in ("random", "rest")}
        whole = accumulate(work, rows, numbers, self.settings.step.accumulate)
        gradients = jax.tree.map(lambda gradient: gradient / whole.count.astype(gradient.dtype), whole.gradients)
        return whole.total / whole.count, whole.numbers, whole.correct, gradients

    def _loss(self, parameters: Any, random: Any, rest: Any, batch: Batch) -> tuple[jax.Array, Any]:
        model = self.skeleton.model({"parameters": parameters, "random": random, "rest": rest})
        model = models.for_training(model, self.skeleton)
        if self.dtype is not None:
            models.computing_in(model, self.dtype, statistics=True)
        value = self.objective(model, _as_parameters(batch, parameters), training=True)
        value = value.plus(linen.sown_losses(model, in_parts=self.settings.step.accumulate > 1))
        self.counts_correct = value.correct is not None
        numbers = self.skeleton.numbers(model)
        return value.mean, ({"random": numbers["random"], "rest": numbers["rest"]}, value)

    def _evaluate(self, numbers: Any) -> Any:
        model = models.for_evaluation(self.skeleton.model(numbers))
        return model if self.dtype is None else models.computing_in(model, self.dtype, statistics=False)


def _numbers(state: State) -> State:
    """The model's numbers in the state of a job."""
    return {part: state[part] for part in models.PARTS}


def _gather_rows(arrays: Batch, numbers: jax.Array) -> Batch:
    return tuple(array.at[numbers].get(mode="promise_in_bounds") for array in arrays)


def _as_parameters(batch: Batch, parameters: Any) -> Batch:
    """Floating-point inputs in double precision, where the parameters are."""
    double = any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(parameters))

    def widen(part: jax.Array) -> jax.Array:
        return part.astype(jnp.float64) if double and jnp.issubdtype(part.dtype, jnp.floating) else part

    widened_batch: Batch = jax.tree.map(widen, batch)
    return widened_batch


# Gradient accumulation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MicroBatchSum:
    """Of the micro-batches so far: the loss as a sum and a count, correct predictions, gradients of the sum."""

    total: Any
    count: Any
    correct: Any
    gradients: Any
    numbers: Any  # the model's random numbers and statistics after them


def accumulate(work: Callable[[Any, Any], MicroBatchSum], rows: Any, numbers: Any, parts: int) -> MicroBatchSum:
    """The sum over all micro-batches of a batch, whose rows are a tree of arrays."""
    whole = size_of(rows)
    size = -(-whole // parts)
    loops, rest = divmod(whole, size)

    def in_loops(array: jax.Array) -> jax.Array:
        return jnp.swapaxes(array[: loops * size].reshape(size, loops, *array.shape[1:]), 0, 1)

    def body(so_far: MicroBatchSum, micro: Any) -> tuple[MicroBatchSum, None]:
        return _plus(so_far, work(micro, so_far.numbers)), None

    micro_batches = jax.tree.map(in_loops, rows)
    shapes = jax.eval_shape(lambda: work(jax.tree.map(lambda array: array[0], micro_batches), numbers))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    so_far = MicroBatchSum(nothing.total, nothing.count, nothing.correct, nothing.gradients, numbers)
    so_far, _ = jax.lax.scan(body, so_far, micro_batches)
    if rest:
        so_far, _ = body(so_far, jax.tree.map(lambda array: array[loops * size :], rows))
    return so_far


def _plus(so_far: MicroBatchSum, now: MicroBatchSum) -> MicroBatchSum:
    gradients = jax.tree.map(jnp.add, so_far.gradients, now.gradients)
    return MicroBatchSum(
        so_far.total + now.total, so_far.count + now.count, so_far.correct + now.correct, gradients, now.numbers
    )


# Sums

# Loss and accuracy of an epoch, summed on the devices and read late. Each step returns new arrays, so older sums can be
# read without waiting. JAX computes in 32 bits, where a long sum of small numbers loses them: the loss is summed in two
# numbers, the second of which holds what the first has rounded away.


def sums_of(totals: Totals) -> Sums:
    """Sums to begin with, as NumPy's arrays."""
    first = np.float64(np.float32(totals.loss_sum))
    loss = [first, totals.loss_sum - first] if math.isfinite(totals.loss_sum) else [totals.loss_sum, 0.0]
    bad = _NEVER if totals.bad_step is None else totals.bad_step
    kind = np.float64 if jax.config.jax_enable_x64 else np.float32
    return {
        "loss": np.array(loss, kind),
        "counts": np.array([totals.correct, totals.count, bad], np.int32),
        "divisor": np.zeros(2, kind),
    }


def add_batch(
    sums: Sums,
    loss: jax.Array,
    correct: jax.Array | None,
    count: int,
    step: jax.Array | int = 0,
    divisor: jax.Array | None = None,
) -> Sums:
    """The sums with one batch more: its mean loss and correct predictions.

    With a divisor the loss is no mean but a sum; all sums are divided by all divisors at the end (:func:`mean_of`).
    """
    kind = sums["loss"].dtype
    new = loss.astype(kind) * (count if divisor is None else 1)
    before = sums["counts"]
    bad = jnp.where(jnp.isfinite(loss), _NEVER, step)
    counts = [before[0] + (0 if correct is None else correct), before[1] + count, jnp.minimum(before[2], bad)]
    return {
        "loss": _longer(sums["loss"], new),
        "counts": jnp.stack([count.astype(jnp.int32) for count in counts]),
        "divisor": _longer(sums["divisor"], jnp.asarray(count if divisor is None else divisor, kind)),
    }


def _longer(sum_of_two: jax.Array, new: jax.Array) -> jax.Array:
    total, rounded = sum_of_two
    larger = total + new
    part = larger - total
    return jnp.stack([larger, rounded + ((total - (larger - part)) + (new - part))])


def is_ready(sums: Sums) -> bool:
    return all(leaf.is_ready() for leaf in sums.values())


def totals_of(sums: Sums, *, counted: bool) -> Totals:
    """The sums as totals; waits for them."""
    loss = np.asarray(sums["loss"], np.float64)  # manyhands: wait-ok they are ready, or an epoch ends
    correct, count, bad = map(int, np.asarray(sums["counts"]))  # manyhands: wait-ok likewise
    total = float(loss.sum()) if np.isfinite(loss).all() else math.nan
    return Totals(total, correct, count, None if bad == _NEVER else bad, counted)


def mean_of(sums: Sums, *, counted: bool) -> Totals:
    """The totals of an evaluation: its loss is divided once, by the sum of all divisors."""
    summed = totals_of(sums, counted=counted)
    divisor = float(np.asarray(sums["divisor"], np.float64).sum())
    return summed if divisor == summed.count else summed.with_weight(divisor)
