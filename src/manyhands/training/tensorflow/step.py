"""One training step on several devices: forward, backward, sum, clip, update. Exact for shards of any size.

The loss of a shard is a mean over its samples. Weighted by (samples of the shard) / (samples of the batch) and summed
over the replicas it is the mean over the batch, and so are the gradients. For example eight samples on two devices in
shares 3:1: the first has the mean loss a of six, the second b of two; 6/8 a + 2/8 b is the mean of all eight. A loss
that is a sum and its count (:class:`~manyhands.training.loss.own_step.LossSum`) is divided by the counts of all
replicas, which are added up before the gradients are.

Each replica has its own variables for weights, statistics and optimizer state. Gradients are summed over the replicas
(nothing else is sent from device to device), and every replica makes the same update. The samples are gathered inside
the step: the host sends where the shards of the batch begin and end. It reads nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from manyhands.backends.tensorflow import devices as backend
from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Averaging
from manyhands.training.data.order import Cursor, Window, epoch_order, whole_batches, windows
from manyhands.training.data.roles import ModelInputs
from manyhands.training.data.sources import Array, Arrays, Batch, Source, Stream
from manyhands.training.learner import check_average
from manyhands.training.options import Settings
from manyhands.training.running_sums import Totals
from manyhands.training.tensorflow import optimizers
from manyhands.training.tensorflow.losses import Losses
from manyhands.training.tensorflow.model import Function
from manyhands.training.tensorflow.world import World

Prepare = Callable[[Batch], Batch]

# Gradients of each term of the loss, statistics, and totals (see ``Step._totals``).
_Outcome = tuple[list[list[Any]], list[Any], Any]

LOSS, CORRECT, COUNT, BAD_STEP = range(4)
PLAIN = 3  # totals before the sums
MOST_SUMS = 8  # losses with a divisor of their own: one for each masked output, or one of the user's
WIDTH = PLAIN + 2 * MOST_SUMS
_NONE_BAD = np.inf
_HOST = "/device:CPU:0"


@dataclass(frozen=True)
class StepInput:
    """One batch as a step takes it: the data, an order of them, and where in it each shard begins and ends."""

    data: tuple[Any, ...]
    order: Any
    bounds: Array


class Feed:
    """Batches of one source, cut into the shards of all replicas of a job.

    The data stay in the host's memory; the step gathers the rows of a shard and copies them to its device.
    """

    def __init__(self, source: Source, replicas: int, check: Any = None) -> None:
        """``check`` looks at the arrays of every batch of a loader."""
        self.source, self.replicas, self.check = source, replicas, check
        self._data = tuple(map(_on_host, source.arrays)) if isinstance(source, Arrays) else ()

    def batches(
        self, cursor: Cursor, size: int, seed: int, shares: Sequence[float] | None, least: int, *, whole: bool = False
    ) -> Iterator[tuple[Window, StepInput]]:
        """Every batch from the cursor to the end of its epoch; ``whole`` ones are not divided over the replicas."""

        def bounds(window: Window) -> Array:
            return np.cumsum([0, *window.sizes(self.replicas, shares, least=least)], dtype=np.int64)

        source = self.source
        if isinstance(source, Stream):
            for window, arrays in whole_batches(source.windows(cursor, seed), whole):
                if self.check is not None:
                    self.check(source.nest(arrays))
                data = tuple(map(_on_host, (*arrays, np.arange(window.size))))
                yield window, StepInput(data[:-1], data[-1], bounds(window))
            return
        order = _on_host(epoch_order(seed, cursor.epoch, source.count, shuffle=source.shuffle))
        for window in windows(cursor, source.count, size, whole=whole):
            yield window, StepInput(self._data, order, window.start + bounds(window))


def _on_host(array: Array) -> Any:
    with tf.device(backend.cpu()):
        return tf.convert_to_tensor(array)


class TrainingStep:
    """The variables of every replica, and the functions that work on them."""

    def __init__(self, strategy: Any, function: Function, optimizer: Any, memory: Sequence[Array], settings: Settings):
        """``optimizer``: None where nothing is trained."""
        self.strategy, self.function, self.optimizer, self.settings = strategy, function, optimizer, settings
        self.rate = None if optimizer is None else optimizers.rate_of(optimizer)
        self.weights = [self._per_replica(variable.numpy()) for variable in function.trained]
        self.statistics = [self._per_replica(variable.numpy()) for variable in function.statistics]
        self.memory = [self._per_replica(value) for value in memory]
        self.sums = self._per_replica(np.array([0, 0, 0, _NONE_BAD]))
        self.test_sums = self._per_replica(np.zeros(WIDTH))
        self.averaged: list[Any] = []  # the weights (and statistics) of which an average is kept
        self.average: list[Any] = []
        self._decay = 0.0
        self.replicas: int = strategy.num_replicas_in_sync
        # Statistics over the whole batch need every replica in every layer, also one without samples.
        self.all_take_part = settings.step.batch_stats == "global" and self.replicas > 1
        self.counts_correct = False
        self.sums_of_loss = 0  # known when the loss was traced
        self.share_statistics = _compile(self._share_statistics)
        self.sums_together = _compile(self._sums_together)

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
        """Before the first step: keep a moving average of the weights."""
        check_average(variable.dtype.size for variable in self.weights)
        floating = [variable for variable in self.statistics if averaging.buffers and variable.dtype.is_floating]
        self.averaged = [*self.weights, *floating]
        self.average = [self._per_replica(self.value(variable)) for variable in self.averaged]
        self._decay = averaging.decay

    def on_each(self, variable: Any) -> list[Any]:
        """The variables of this process's replicas."""
        return list(self.strategy.experimental_local_results(variable))

    def value(self, variable: Any) -> Array:
        """What the first of this process's replicas has."""
        value: Array = self.on_each(variable)[0].numpy()
        return value

    def assign(self, variable: Any, value: Any) -> None:
        for replica in self.on_each(variable):
            replica.assign(value)

    def copy_from_first(self, world: World) -> None:
        """Give all processes the values of the first: others may have drawn other weights."""
        for variable in (*self.weights, *self.statistics, *self.memory) if world.size > 1 else ():
            value = self.value(variable)
            first = np.frombuffer(world.from_first(value.tobytes()), value.dtype).reshape(value.shape)
            self.assign(variable, first)

    def set_sums(self, totals: Totals) -> None:
        """Begin with these totals, on the first of this process's replicas."""
        self.assign(self.sums, [0, 0, 0, math.inf])
        self.on_each(self.sums)[0].assign([totals.loss_sum, totals.correct, totals.count, math.inf])

    def trainer(self, prepare: Prepare) -> Any:
        """The step for one source: ``(data, order, bounds, number, factor)``."""

        def work(*arguments: Any) -> None:
            self.strategy.run(functools.partial(self._train_replica, prepare), args=arguments)

        return _compile(work)

    def tester(self, prepare: Prepare, *, loss: bool, inputs: ModelInputs | None, gathered: bool) -> Any:
        """Evaluates a batch, ``(data, order, bounds)``: its loss is added to the sums of a test, if ``loss``.

        ``inputs``: it returns the model's outputs and the targets, of each replica; ``gathered``: each has those of
        all replicas, also of other processes.
        """

        def replica(data: Batch, order: Any, bounds: Any) -> Any:
            number, begin, end = _place(bounds)
            pairs: list[Any] = []

            def work() -> Any:
                values = _read(self.weights), _read(self.statistics), (0, number)
                batch = prepare(_gather(data, order[begin:end]))
                losses = self.function(*values, batch, training=False)[0] if loss else Losses()
                pair = losses.output, losses.targets
                if inputs is not None and losses.output is None:  # the model's own step does not return it
                    targets = batch[-1] if loss and len(batch) > 1 else ()
                    pair = self.function.output(*values, batch, inputs), targets
                pairs.append(pair if inputs is not None else ())
                return self._totals(losses, end - begin), pairs[0]

            def nothing() -> Any:
                return tf.zeros(WIDTH, tf.float64), tf.nest.map_structure(_no_rows, pairs[0])

            totals, pair = tf.cond(end > begin, work, nothing)
            self.test_sums.assign_add(totals)
            context = tf.distribute.get_replica_context()
            return tf.nest.map_structure(lambda rows: context.all_gather(rows, 0), pair) if gathered else pair

        return _compile(lambda *arguments: self.strategy.run(replica, args=arguments))

    # What one replica does

    def _train_replica(self, prepare: Prepare, data: Batch, order: Any, bounds: Any, number: Any, factor: Any) -> None:
        (replica, begin, end), whole = _place(bounds), bounds[-1] - bounds[0]
        weights, statistics = _read(self.weights), _read(self.statistics)
        parts, sums = self.settings.step.accumulate, tf.zeros(WIDTH, tf.float64)
        gradients: list[list[Any]] = []
        for part in range(parts):
            start, stop = (begin + (end - begin) * i // parts for i in (part, part + 1))

            def rows(start: Any = start, stop: Any = stop) -> Batch:
                return prepare(_gather(data, order[start:stop]))

            numbers = (number, replica, part)
            more, statistics, now = self._part(rows, stop - start, whole, weights, statistics, numbers)
            both = zip(gradients, more, strict=True)
            gradients = [list(map(tf.add, *parts)) for parts in both] if gradients else more
            sums += now
        totals, summed = self._divide(gradients, sums, whole)
        share = tf.cast(totals[LOSS] / tf.cast(whole, tf.float64), summed[0].dtype)
        *summed, loss = _over_replicas([*summed, share])
        if self.settings.gradient_clip_val:
            summed, _ = tf.clip_by_global_norm(summed, self.settings.gradient_clip_val)
        self._update(summed, weights, statistics, loss, factor)
        before = tf.convert_to_tensor(self.sums)
        bad = tf.where(
            tf.math.is_finite(loss), before[BAD_STEP], tf.minimum(before[BAD_STEP], tf.cast(number, tf.float64))
        )
        self.sums.assign(tf.concat([before[:BAD_STEP] + totals, [bad]], 0))

    def _part(
        self, rows: Callable[[], Batch], size: Any, whole: Any, weights: list[Any], statistics: list[Any], numbers: Any
    ) -> _Outcome:
        """Gradients of each term of the loss, statistics and totals of a part of a shard, if it has samples."""

        def work() -> _Outcome:
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
                tape.watch(weights)
                losses, after = self.function(weights, statistics, numbers, rows(), training=True)
                terms = _terms(losses, size, whole)
            gradients = [tape.gradient(term, weights, unconnected_gradients="zero") for term in terms]
            return list(map(_read, gradients)), after, self._totals(losses, size)

        if self.all_take_part or (self.replicas == 1 and self.settings.step.accumulate == 1):
            return work()

        def nothing() -> _Outcome:  # traced after the other branch
            gradients = [[tf.zeros_like(weight) for weight in weights] for _ in range(1 + self.sums_of_loss)]
            return gradients, statistics, tf.zeros(WIDTH, tf.float64)

        outcome: _Outcome = tf.cond(size > 0, work, nothing)
        return outcome

    def _divide(self, gradients: list[list[Any]], totals: Any, whole: Any) -> tuple[Any, list[Any]]:
        """This replica's part of the loss and of its gradients, each sum divided by the count of all replicas."""
        first, *of_sums = gradients
        plain, totals, counts = tf.split(totals, [PLAIN, MOST_SUMS, MOST_SUMS])
        if not of_sums:
            return plain, first
        (counts,) = _over_replicas([counts])
        wide = tf.cast(whole, tf.float64)
        for number, sums in enumerate(of_sums):
            # The gradients are those of the sum over the number of samples, so that half precision can hold them.
            factor = tf.math.divide_no_nan(wide, counts[number])
            first = [a + b * tf.cast(factor, b.dtype) for a, b in zip(first, sums, strict=True)]
        loss = tf.reduce_sum(totals[: len(of_sums)] / counts[: len(of_sums)]) * wide
        return tf.tensor_scatter_nd_add(plain, [[LOSS]], [loss]), first

    def _update(self, gradients: list[Any], weights: list[Any], statistics: list[Any], loss: Any, factor: Any) -> None:
        memory, average = _read(self.memory), _read(self.average)
        used = list(memory)
        if self.rate is not None:
            used[self.rate] = memory[self.rate] * tf.cast(factor, memory[self.rate].dtype)
        new_weights, new_memory = self.optimizer.stateless_apply(used, gradients, weights)
        if self.rate is not None:
            new_memory[self.rate] = memory[self.rate]
        old = [*weights, *memory, *_read(self.statistics), *average]
        floating = [value for value in statistics if value.dtype.is_floating]
        averaged = [*new_weights, *floating][: len(average)]  # see keep_average: all statistics, or none
        new = [*new_weights, *new_memory, *statistics, *self._move_average(average, averaged)]
        if self.settings.step.on_nan == "continue":  # a batch whose loss is NaN leaves no trace
            new = [tf.where(tf.math.is_finite(loss), a, b) for a, b in zip(new, old, strict=True)]
        for variable, value in zip([*self.weights, *self.memory, *self.statistics, *self.average], new, strict=True):
            variable.assign(value)

    def _move_average(self, average: list[Any], values: list[Any]) -> list[Any]:
        """The moving average with the values of this step; infinity, as in a mask, stays."""
        moved = [mean + (value - mean) * (1 - self._decay) for mean, value in zip(average, values, strict=True)]
        return [tf.where(a == b, b, c) for a, b, c in zip(average, values, moved, strict=True)]

    def _totals(self, losses: Losses, size: Any) -> Any:
        """Loss, correct predictions and samples, then the totals of the sums and their counts; zero without samples."""
        self.sums_of_loss = len(losses.sums)
        if self.sums_of_loss > MOST_SUMS:
            raise BadSettings(f"{self.sums_of_loss} losses have weights or masks of their own: {MOST_SUMS} at most")
        self.counts_correct |= losses.correct is not None
        count = tf.cast(size, tf.float64)
        loss = 0.0 if losses.mean is None else tf.cast(losses.mean, tf.float64) * count
        rest = [0.0] * (MOST_SUMS - self.sums_of_loss)
        totals, counts = ([getattr(part, name) for part in losses.sums] + rest for name in ("total", "count"))
        values = [loss, 0.0 if losses.correct is None else losses.correct, count, *totals, *counts]
        totals = tf.stack([tf.cast(value, tf.float64) for value in values])
        return tf.where(size > 0, totals, tf.zeros_like(totals))

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


def _no_rows(tensor: Any) -> Any:
    """A tensor of the same kind without a row, for a replica without samples."""
    return tf.zeros([0, *(size or 0 for size in tensor.shape[1:])], tensor.dtype)


def _compile(work: Callable[..., Any]) -> Any:
    """A graph of TensorFlow's for one job.

    TensorFlow warns about functions that are traced again and again, and identifies them by their code: several short
    jobs in one program would cause the warning. A partial has no code, so it is identified as an object.
    """
    return tf.function(functools.partial(work), autograph=False, reduce_retracing=True)


def _gather(data: Batch, numbers: Any) -> Batch:
    """The samples of those numbers; only they are copied from the host to the device."""
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
    """The terms to take gradients of: the mean, weighted by its samples, and each sum. All are zero without samples."""
    sums = [part.total / tf.cast(whole, part.total.dtype) for part in losses.sums]
    first = tf.zeros((), sums[0].dtype) if losses.mean is None else losses.mean
    first *= tf.cast(size, first.dtype) / tf.cast(whole, first.dtype)
    return [tf.where(size > 0, term, tf.zeros_like(term)) for term in (first, *sums)]
