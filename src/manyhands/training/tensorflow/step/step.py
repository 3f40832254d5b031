"""One training step on several devices: forward, backward, sum, clip, update. Exact for shards of any size.

The loss of a shard is a mean over its samples. Weighted by (samples of the shard) / (samples of the batch) and summed
over the replicas it is the mean over the batch, and so are the gradients. For example eight samples on two devices in
shares 3:1: the first has the mean loss a of six, the second b of two; 6/8 a + 2/8 b is the mean of all eight. A loss
that is a sum and its count (:class:`~manyhands.training.loss.own_step.LossSum`) is divided by the counts of all
replicas, which are added up before the gradients are. A sum without a divisor (Keras's ``reduction="sum"``) is only
added up.

Each replica has its own variables for weights, statistics and optimizer state. Gradients are summed over the replicas
(nothing else is sent from device to device), and every replica makes the same update. The samples are gathered inside
the step: the host sends where the shards of the batch begin and end. It reads nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Averaging
from manyhands.training.data.sources import Array, Batch
from manyhands.training.running_sums import Figures
from manyhands.training.settings import Settings
from manyhands.training.tensorflow import optimizers
from manyhands.training.tensorflow.loss.keras_losses import Losses
from manyhands.training.tensorflow.step.function import Function

Prepare = Callable[[Batch], Batch]

# Gradients of each term of the loss, weights and statistics, and figures.
_Outcome = tuple[list[list[Any]], tuple[list[Any], list[Any]], list[Any]]

LOSS, CORRECT, COUNT, BAD_STEP = range(4)
MOST_SUMS = 8  # losses with a divisor of their own: one for each masked output, or one of the user's
_NONE_BAD = np.inf
_HOST = "/device:CPU:0"


class Step:
    """The variables of every replica, and the functions that work on them."""

    def __init__(self, strategy: Any, function: Function, optimizer: Any, memory: Sequence[Array], settings: Settings):
        """``optimizer``: None where nothing is trained."""
        self.strategy, self.function, self.optimizer, self.settings = strategy, function, optimizer, settings
        self.rate = None if optimizer is None else optimizers.rate_of(optimizer)
        self.weights = [self._per_replica(variable.numpy()) for variable in function.trained]
        self.statistics = [self._per_replica(variable.numpy()) for variable in function.statistics]
        self.memory = [self._per_replica(value) for value in memory]
        self.sums = self._per_replica(np.array([0, 0, 0, _NONE_BAD]))
        # After the four figures: the totals of sums with a count of their own, and the counts.
        self.test_sums = self._per_replica(np.array([0, 0, 0, _NONE_BAD, *[0] * 2 * MOST_SUMS]))
        self.averaged: list[Any] = []  # the weights (and statistics) of which an average is kept
        self.average: list[Any] = []
        self._decay = 0.0
        self.replicas: int = strategy.num_replicas_in_sync
        # Statistics over the whole batch need every replica in every layer, also one without samples.
        self.all_take_part = settings.step.batch_stats == "global" and self.replicas > 1
        self.counts_correct = False
        self.nothing_counts = 0.0  # the mean of a sum whose count is 0; known when the loss was traced
        self.sums_of_loss = 0
        self._terms = 1  # of the loss: its mean over samples, and the sums; known when it was traced
        self.share_statistics = _compiled(self._share_statistics)
        self.sums_together = _compiled(self._sums_together)

    def _per_replica(self, value: Array) -> Any:
        """A variable with a separate value on every replica, read and written without the others."""
        with self.strategy.scope():
            return tf.Variable(
                value,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def keep_average(self, averaging: Averaging) -> None:
        """Before the first step: keep a moving average of the weights, in float32 at least."""
        floating = [variable for variable in self.statistics if averaging.buffers and variable.dtype.is_floating]
        self.averaged = [*self.weights, *floating]
        first = [self.on_each(variable)[0].numpy() for variable in self.averaged]
        self.average = [self._per_replica(value.astype(np.promote_types(value.dtype, np.float32))) for value in first]
        self._decay = averaging.decay

    def on_each(self, variable: Any) -> list[Any]:
        """The variables of this process's replicas."""
        return list(self.strategy.experimental_local_results(variable))

    def set_sums(self, sums: Any, figures: Figures) -> None:
        """Begin with these figures, on the first of this process's replicas."""
        first, *others = self.on_each(sums)
        rest = [0.0] * (first.shape[0] - BAD_STEP - 1)
        first.assign([figures.loss_sum, figures.correct, figures.count, math.inf, *rest])
        for other in others:
            other.assign([0, 0, 0, math.inf, *rest])

    def trainer(self, prepare: Prepare, *, on_host: bool) -> Any:
        """The step for one source: ``(data, order, bounds, number, factor)``."""

        replica = functools.partial(self._train_replica, prepare, on_host)

        def work(*arguments: Any) -> None:
            self.strategy.run(replica, args=arguments)

        return _compiled(work)

    def tester(self, prepare: Prepare, *, on_host: bool, with_outputs: bool = False, gathered: bool = False) -> Any:
        """Adds a batch to the sums of a test: ``(data, order, bounds)``.

        ``with_outputs``: it returns the model's outputs and the targets, of each replica; ``gathered``: each has
        those of all replicas, also of other processes.
        """

        replica = functools.partial(self._test_replica, prepare, on_host, with_outputs, gathered)
        return _compiled(lambda *arguments: self.strategy.run(replica, args=arguments))

    def predictor(self, prepare: Prepare, *, on_host: bool, gathered: bool) -> Any:
        """The model's outputs on each replica: ``(data, order, bounds)``."""
        replica = functools.partial(self._predict_replica, prepare, on_host, gathered)
        return _compiled(lambda *arguments: self.strategy.run(replica, args=arguments))

    # What one replica does

    def _train_replica(
        self, prepare: Prepare, on_host: bool, data: Batch, order: Any, bounds: Any, number: Any, factor: Any
    ) -> None:
        (replica, begin, end), whole = _place(bounds), bounds[-1] - bounds[0]
        weights, statistics = self._values()
        parts, sums = self.settings.step.accumulate, _no_figures()
        gradients: list[list[Any]] = []
        for part in range(parts):
            start, stop = (begin + (end - begin) * i // parts for i in (part, part + 1))

            def rows(start: Any = start, stop: Any = stop) -> Batch:
                return prepare(_gathered(data, order[start:stop], on_host))

            numbers = (number, replica, part)
            more, (weights, statistics), now = self._part(rows, stop - start, whole, weights, statistics, numbers)
            gradients = [_added(*both) for both in zip(gradients, more, strict=True)] if gradients else more
            sums = _added(sums, now)
        figures, summed = self._divided(gradients, sums, whole)
        share = tf.cast(figures[LOSS] / tf.cast(whole, tf.float64), summed[0].dtype)
        *summed, loss = _over_replicas([*summed, share])
        if self.settings.gradient_clip_val:
            summed, _ = tf.clip_by_global_norm(summed, self.settings.gradient_clip_val)
        self._update(summed, weights, statistics, loss, factor)
        none_bad = tf.constant(_NONE_BAD, tf.float64)
        _add(self.sums, figures, tf.where(tf.math.is_finite(loss), none_bad, tf.cast(number, tf.float64)))

    def _part(
        self, rows: Callable[[], Batch], size: Any, whole: Any, weights: list[Any], statistics: list[Any], numbers: Any
    ) -> _Outcome:
        """Gradients of each term of the loss, values after it and figures of a part of a shard, if it has samples."""
        alone = self.replicas == 1 and self.settings.step.accumulate == 1

        def work() -> _Outcome:
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
                tape.watch(weights)
                losses, after = self.function(weights, statistics, numbers, rows(), training=True)
                terms = _terms(losses, size, whole)
            if not alone:
                self._refuse_assigned(weights, after[0])
            self._terms = len(terms)
            gradients = [tape.gradient(term, weights, unconnected_gradients="zero") for term in terms]
            return (
                list(map(_read, gradients)),
                after,
                self._figures(losses, size, whole),
            )

        if self.all_take_part or alone:
            return work()

        def nothing() -> _Outcome:  # traced after the other branch
            gradients = [[tf.zeros_like(weight) for weight in weights] for _ in range(self._terms)]
            return gradients, (weights, statistics), _no_figures()

        outcome: _Outcome = tf.cond(size > 0, work, nothing)
        return outcome

    def _refuse_assigned(self, before: list[Any], after: list[Any]) -> None:
        """Refuse a weight that is trained and assigned in ``call``: each part of a batch would assign its own value."""
        for variable, old, new in zip(self.function.trained, before, after, strict=True):
            if new is not old:
                raise BadSettings(
                    f"{variable.path} is trained, and a layer assigns it in its call (as SpectralNormalization does): "
                    "on several devices, or with accumulate, a batch is processed in parts, each of which would assign "
                    "it again. Train this model on one device, with accumulate=1"
                )

    def _divided(self, gradients: list[list[Any]], figures: list[Any], whole: Any) -> tuple[Any, list[Any]]:
        """This replica's part of the loss and of its gradients, each sum divided by the count of all replicas."""
        (first, *of_sums), (plain, totals, counts) = gradients, figures
        if not of_sums:
            return plain, first
        (counts,) = _over_replicas([counts])
        for number, sums in enumerate(of_sums):
            # The gradients are those of the sum over the number of samples, so that half precision can hold them.
            factor = tf.math.divide_no_nan(tf.cast(whole, tf.float64), counts[number])
            first = [a + b * tf.cast(factor, b.dtype) for a, b in zip(first, sums, strict=True)]
        used = tf.range(MOST_SUMS) < len(of_sums)
        nothing = tf.where(used & (counts == 0), tf.constant(self.nothing_counts, tf.float64), 0.0)
        loss = tf.reduce_sum(tf.math.divide_no_nan(totals, counts) + nothing) * tf.cast(whole, tf.float64)
        return tf.tensor_scatter_nd_add(plain, [[LOSS]], [loss]), first

    def _update(self, gradients: list[Any], weights: list[Any], statistics: list[Any], loss: Any, factor: Any) -> None:
        memory = _read(self.memory)
        used = list(memory)
        if self.rate is not None:
            used[self.rate] = memory[self.rate] * tf.cast(factor, memory[self.rate].dtype)
        new_weights, new_memory = self.optimizer.stateless_apply(used, gradients, weights)
        if self.rate is not None:
            new_memory[self.rate] = memory[self.rate]
        average = _read(self.average)
        old = [*_read(self.weights), *memory, *_read(self.statistics), *average]
        floating = [value for value in statistics if value.dtype.is_floating]
        averaged = [*new_weights, *floating][: len(average)]  # see keep_average: all statistics, or none
        new = [*new_weights, *new_memory, *statistics, *self._moved(average, averaged)]
        if self.settings.step.on_nan == "continue":  # a batch whose loss is NaN leaves no trace
            new = [tf.where(tf.math.is_finite(loss), a, b) for a, b in zip(new, old, strict=True)]
        for variable, value in zip([*self.weights, *self.memory, *self.statistics, *self.average], new, strict=True):
            variable.assign(value)

    def _moved(self, average: list[Any], values: list[Any]) -> list[Any]:
        """The moving average with the values of this step; infinity, as in a mask, stays."""
        wide = [tf.cast(value, mean.dtype) for mean, value in zip(average, values, strict=True)]
        moved = [mean + (value - mean) * (1 - self._decay) for mean, value in zip(average, wide, strict=True)]
        return [tf.where(a == b, b, c) for a, b, c in zip(average, wide, moved, strict=True)]

    def _test_replica(
        self, prepare: Prepare, on_host: bool, with_outputs: bool, gathered: bool, data: Batch, order: Any, bounds: Any
    ) -> Any:
        replica, begin, end = _place(bounds)
        pairs: list[Any] = []

        def work() -> Any:
            weights, statistics = self._values()
            batch = prepare(_gathered(data, order[begin:end], on_host))
            losses, _ = self.function(weights, statistics, (0, replica), batch, training=False)
            if with_outputs and losses.output is None:  # the model's own step does not return it
                output = self.function.output(weights, statistics, (0, replica), batch)
                losses = replace(losses, output=output, targets=batch[-1] if len(batch) > 1 else ())
            pairs.append((losses.output, losses.targets) if with_outputs else ())
            return self._figures(losses, end - begin, bounds[-1] - bounds[0]), pairs[0]

        (figures, totals, counts), pair = tf.cond(end > begin, work, lambda: (_no_figures(), _no_rows(pairs[0])))
        _add(self.test_sums, figures, tf.constant(_NONE_BAD, tf.float64), [totals, counts])
        return _from_all(pair) if gathered else pair

    def _predict_replica(
        self, prepare: Prepare, on_host: bool, gathered: bool, data: Batch, order: Any, bounds: Any
    ) -> Any:
        replica, begin, end = _place(bounds)
        outputs: list[Any] = []

        def work() -> Any:
            batch = prepare(_gathered(data, order[begin:end], on_host))
            outputs.append(self.function.output(*self._values(), (0, replica), batch))
            return outputs[0]

        output = tf.cond(end > begin, work, lambda: _no_rows(outputs[0]))
        return _from_all(output) if gathered else output

    def _values(self) -> tuple[list[Any], list[Any]]:
        """This replica's weights and statistics."""
        return _read(self.weights), _read(self.statistics)

    def _figures(self, losses: Losses, size: Any, whole: Any) -> list[Any]:
        """The three figures, and the totals and counts of the sums; all zero without samples."""
        if len(losses.sums) > MOST_SUMS:
            raise BadSettings(
                f"the loss has {len(losses.sums)} sums with a count of their own, and {MOST_SUMS} are the most: give "
                "fewer losses with weights or masks of their own"
            )
        self.counts_correct |= losses.correct is not None
        self.nothing_counts = np.nan if losses.by_user else 0.0
        count, zero = tf.cast(size, tf.float64), tf.zeros((), tf.float64)
        loss = zero if losses.mean is None else tf.cast(losses.mean, tf.float64) * count
        loss += zero if losses.total is None else losses.total.shown(whole)
        plain = tf.stack([loss, zero if losses.correct is None else losses.correct, count])
        self.sums_of_loss = len(losses.sums)
        pairs = [(tf.cast(loss_sum.total, tf.float64), tf.cast(loss_sum.count, tf.float64)) for loss_sum in losses.sums]
        pairs += [(zero, zero)] * (MOST_SUMS - len(pairs))
        totals, counts = (tf.stack(column) for column in zip(*pairs, strict=True))
        return [tf.where(size > 0, part, tf.zeros_like(part)) for part in (plain, totals, counts)]

    def _sums_together(self) -> Any:
        """The sums over all replicas of all processes, on each of them; without the first bad step."""

        def add_up() -> Any:
            sums = tf.convert_to_tensor(self.sums)
            none_bad = tf.constant([_NONE_BAD], tf.float64)
            return tf.concat([_over_replicas([sums[:BAD_STEP]])[0], none_bad], 0)

        return self.strategy.run(add_up)

    def _share_statistics(self, source: Any) -> None:
        """Every replica gets the statistics of one of them."""

        def share(source: Any) -> None:
            chosen = tf.distribute.get_replica_context().replica_id_in_sync_group == source
            shared = [*self.statistics, *self.average[len(self.weights) :]]
            masked = [tf.where(chosen, value, tf.zeros_like(value)) for value in _read(shared)]
            for variable, value in zip(shared, _over_replicas(masked), strict=True):
                variable.assign(value)

        if self.statistics and self.replicas > 1:
            self.strategy.run(share, args=(source,))


def _read(variables: Sequence[Any]) -> list[Any]:
    """The values of variables, or sparse gradients as dense ones."""
    return [tf.convert_to_tensor(variable) for variable in variables]


def _place(bounds: Any) -> tuple[Any, Any, Any]:
    """This replica's number, and where its shard begins and ends."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    return replica, bounds[replica], bounds[replica + 1]


def _no_rows(like: Any) -> Any:
    """Tensors of the same kinds without a row, for a replica without samples."""

    def none(tensor: Any) -> Any:
        return tf.zeros([0, *(size or 0 for size in tensor.shape[1:])], tensor.dtype)

    return tf.nest.map_structure(none, like)


def _from_all(rows: Any) -> Any:
    """The rows of all replicas, one after the other."""
    return tf.nest.map_structure(lambda part: tf.distribute.get_replica_context().all_gather(part, 0), rows)


def _compiled(work: Callable[..., Any]) -> Any:
    """A graph of TensorFlow's for one job.

    TensorFlow warns about functions that are traced again and again, and identifies them by their code: several short
    jobs in one program would cause the warning. A partial has no code, so it is identified as an object.
    """
    return tf.function(functools.partial(work), autograph=False, reduce_retracing=True)


def _gathered(data: Batch, numbers: Any, on_host: bool) -> Batch:
    """The samples of those numbers; only they are copied from the host to the device."""
    if not on_host:
        return tuple(tf.gather(array, numbers) for array in data)
    with tf.device(_HOST):
        rows = [tf.gather(array, numbers) for array in data]
    return tuple(tf.identity(part) for part in rows)


def _over_replicas(values: Sequence[Any]) -> list[Any]:
    """The sums over all replicas, dtype by dtype: TensorFlow packs only values of one dtype together."""
    replicas, summed = tf.distribute.get_replica_context(), list(values)
    for kind in dict.fromkeys(value.dtype for value in values):
        places = [place for place, value in enumerate(values) if value.dtype == kind]
        sums = replicas.all_reduce(tf.distribute.ReduceOp.SUM, [values[place] for place in places])
        for place, total in zip(places, sums, strict=True):
            summed[place] = total
    return summed


def _terms(losses: Losses, size: Any, whole: Any) -> list[Any]:
    """The terms to take gradients of: the mean, weighted by its samples, with undivided sums added, and each other sum.

    All are zero without samples.
    """
    sums = [loss_sum.total / tf.cast(whole, loss_sum.total.dtype) for loss_sum in losses.sums]
    totals = [] if losses.total is None else [losses.total.value]
    first = tf.zeros((), (*totals, *sums)[0].dtype) if losses.mean is None else losses.mean
    first *= tf.cast(size, first.dtype) / tf.cast(whole, first.dtype)
    first += sum(tf.cast(total, first.dtype) for total in totals)
    return [tf.where(size > 0, term, tf.zeros_like(term)) for term in (first, *sums)]


def _no_figures() -> list[Any]:
    return [tf.zeros(length, tf.float64) for length in (BAD_STEP, MOST_SUMS, MOST_SUMS)]


def _added(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    return [a + b for a, b in zip(first, second, strict=True)]


def _add(variable: Any, figures: Any, bad_step: Any, more: Sequence[Any] = ()) -> None:
    before = tf.convert_to_tensor(variable)
    bad = tf.minimum(before[BAD_STEP], bad_step)
    after = [before[:BAD_STEP] + figures, [bad]]
    if more:
        after.append(before[BAD_STEP + 1 :] + tf.concat(more, 0))
    variable.assign(tf.concat(after, 0))
