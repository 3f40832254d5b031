"""One training step on several devices, exact whatever each one's shard is.

The loss of a shard is a mean over its samples. Weighted by (samples of the shard) / (samples of the batch) and summed
over the replicas it is the mean over the batch, and so are the gradients. Eight samples on two devices in shares 3:1:
the first has the mean loss a of six, the second b of two; 6/8 a + 2/8 b is the mean of all eight.

Each replica has variables of its own for weights, statistics and what the optimizer remembers. Gradients are summed
over the replicas (the only thing that goes from device to device), every replica makes the same update. The samples
are gathered inside the step: the host sends where the shards of the batch begin and end. Nothing is read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from manyhands.training.settings import Settings
from manyhands.training.sources import Array, Batch
from manyhands.training.tensorflow import optimizers
from manyhands.training.tensorflow.function import Function

Prepare = Callable[[Batch], Batch]

LOSS, RIGHT, COUNT, BAD_STEP = range(4)
_NONE_BAD = np.inf
_HOST = "/device:CPU:0"


class Step:
    """What every replica holds, and the functions that work on it."""

    def __init__(self, strategy: Any, function: Function, optimizer: Any, memory: Sequence[Array], settings: Settings):
        self.strategy, self.function, self.optimizer, self.settings = strategy, function, optimizer, settings
        self.rate = optimizers.rate_of(optimizer)
        self.weights = [self._own(variable.numpy()) for variable in function.trained]
        self.kept = [self._own(variable.numpy()) for variable in function.kept]
        self.memory = [self._own(value) for value in memory]
        self.sums = self._own(np.array([0, 0, 0, _NONE_BAD]))
        self.test_sums = self._own(np.array([0, 0, 0, _NONE_BAD]))
        self.replicas: int = strategy.num_replicas_in_sync
        # Statistics over the whole batch need every replica in every layer, also one without samples.
        self.all_take_part = settings.batch_stats == "global" and self.replicas > 1
        self.counts_right = False
        self.share_kept = _compiled(self._share_kept)

    def _own(self, value: Array) -> Any:
        """A variable of which every replica has one, read and written without the others."""
        with self.strategy.scope():
            return tf.Variable(
                value,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def on_each(self, variable: Any) -> list[Any]:
        """The variables of this process's replicas."""
        return list(self.strategy.experimental_local_results(variable))

    def trainer(self, prepare: Prepare, *, on_host: bool) -> Any:
        """The step for one source: ``(data, order, bounds, number, factor)``."""

        replica = functools.partial(self._train_replica, prepare, on_host)

        def work(*given: Any) -> None:
            self.strategy.run(replica, args=given)

        return _compiled(work)

    def tester(self, prepare: Prepare, *, on_host: bool) -> Any:
        """Adds a batch to the sums of a test: ``(data, order, bounds)``."""

        replica = functools.partial(self._test_replica, prepare, on_host)

        def work(*given: Any) -> None:
            self.strategy.run(replica, args=given)

        return _compiled(work)

    # What one replica does

    def _train_replica(
        self, prepare: Prepare, on_host: bool, data: Batch, order: Any, bounds: Any, number: Any, factor: Any
    ) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        begin, end = bounds[replica], bounds[replica + 1]
        whole, weights = bounds[-1] - bounds[0], [tf.convert_to_tensor(one) for one in self.weights]
        kept = [tf.convert_to_tensor(one) for one in self.kept]
        parts, sums = self.settings.accumulate, tf.zeros(3, tf.float64)
        gradients: list[Any] = []
        for part in range(parts):
            start, stop = (begin + (end - begin) * i // parts for i in (part, part + 1))

            def rows(start: Any = start, stop: Any = stop) -> Batch:
                return prepare(_gathered(data, order[start:stop], on_host))

            numbers = (number, replica, part)
            more, kept, now = self._part(rows, stop - start, whole, weights, kept, numbers)
            gradients = more if not gradients else [a + b for a, b in zip(gradients, more, strict=True)]
            sums += now
        share = tf.cast(sums[LOSS] / tf.cast(whole, tf.float64), gradients[0].dtype)
        *gradients, loss = _over_replicas([*gradients, share])
        if self.settings.gradient_clip_val:
            gradients, _ = tf.clip_by_global_norm(gradients, self.settings.gradient_clip_val)
        self._update(gradients, weights, kept, loss, factor)
        none_bad = tf.constant(_NONE_BAD, tf.float64)
        _add(self.sums, sums, tf.where(tf.math.is_finite(loss), none_bad, tf.cast(number, tf.float64)))

    def _part(
        self, rows: Callable[[], Batch], size: Any, whole: Any, weights: list[Any], kept: list[Any], numbers: Any
    ) -> tuple[list[Any], list[Any], Any]:
        """Gradients, statistics and figures of one part of a shard; without samples they are nothing."""

        def work() -> tuple[list[Any], list[Any], Any]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights)
                loss, right, after = self.function(weights, kept, numbers, rows(), training=True)
                loss = tf.where(size > 0, loss, tf.zeros_like(loss))
                weighted = loss * (tf.cast(size, loss.dtype) / tf.cast(whole, loss.dtype))
            gradients = tape.gradient(weighted, weights, unconnected_gradients="zero")
            return [tf.convert_to_tensor(one) for one in gradients], after, self._figures(loss, right, size)

        if self.all_take_part or (self.replicas == 1 and self.settings.accumulate == 1):
            return work()
        nothing = ([tf.zeros_like(one) for one in weights], kept, tf.zeros(3, tf.float64))
        found: tuple[list[Any], list[Any], Any] = tf.cond(size > 0, work, lambda: nothing)
        return found

    def _update(self, gradients: list[Any], weights: list[Any], kept: list[Any], loss: Any, factor: Any) -> None:
        memory = [tf.convert_to_tensor(one) for one in self.memory]
        used = list(memory)
        if self.rate is not None:
            used[self.rate] = memory[self.rate] * tf.cast(factor, memory[self.rate].dtype)
        new_weights, new_memory = self.optimizer.stateless_apply(used, gradients, weights)
        if self.rate is not None:
            new_memory[self.rate] = memory[self.rate]
        old = [*weights, *memory, *map(tf.convert_to_tensor, self.kept)]
        new = [*new_weights, *new_memory, *kept]
        if self.settings.on_nan == "continue":  # a batch without a loss shall leave no trace
            new = [tf.where(tf.math.is_finite(loss), a, b) for a, b in zip(new, old, strict=True)]
        for variable, value in zip([*self.weights, *self.memory, *self.kept], new, strict=True):
            variable.assign(value)

    def _test_replica(self, prepare: Prepare, on_host: bool, data: Batch, order: Any, bounds: Any) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        begin, end = bounds[replica], bounds[replica + 1]

        def work() -> Any:
            weights, kept = ([tf.convert_to_tensor(one) for one in part] for part in (self.weights, self.kept))
            batch = prepare(_gathered(data, order[begin:end], on_host))
            loss, right, _ = self.function(weights, kept, (0, replica), batch, training=False)
            return self._figures(loss, right, end - begin)

        figures = tf.cond(end > begin, work, lambda: tf.zeros(3, tf.float64))
        _add(self.test_sums, figures, tf.constant(_NONE_BAD, tf.float64))

    def _figures(self, loss: Any, right: Any, size: Any) -> Any:
        self.counts_right |= right is not None
        count = tf.cast(size, tf.float64)
        return tf.stack(
            [tf.cast(loss, tf.float64) * count, tf.zeros((), tf.float64) if right is None else right, count]
        )

    def _share_kept(self, source: Any) -> None:
        """Every replica gets the statistics of one of them."""

        def share(source: Any) -> None:
            chosen = tf.distribute.get_replica_context().replica_id_in_sync_group == source
            own = [tf.convert_to_tensor(one) for one in self.kept]
            masked = [tf.where(chosen, one, tf.zeros_like(one)) for one in own]
            for variable, value in zip(self.kept, _over_replicas(masked), strict=True):
                variable.assign(value)

        if self.kept and self.replicas > 1:
            self.strategy.run(share, args=(source,))


def _compiled(work: Callable[..., Any]) -> Any:
    """A graph of TensorFlow's for one job.

    TensorFlow warns of functions that are traced again and again, and tells them apart by their code: it would warn of
    several short jobs in one program. An object that has no code of its own is told apart as itself.
    """
    return tf.function(functools.partial(work), autograph=False, reduce_retracing=True)


def _gathered(data: Batch, numbers: Any, on_host: bool) -> Batch:
    """The samples of those numbers; from the host's memory only they go to the device."""
    if not on_host:
        return tuple(tf.gather(one, numbers) for one in data)
    with tf.device(_HOST):
        found = [tf.gather(one, numbers) for one in data]
    return tuple(tf.identity(one) for one in found)


def _over_replicas(values: Sequence[Any]) -> list[Any]:
    """The sums over all replicas; TensorFlow packs values of one kind of number together, and only those."""
    replicas, found = tf.distribute.get_replica_context(), list(values)
    for kind in dict.fromkeys(value.dtype for value in values):
        places = [place for place, value in enumerate(values) if value.dtype == kind]
        sums = replicas.all_reduce(tf.distribute.ReduceOp.SUM, [values[place] for place in places])
        for place, one in zip(places, sums, strict=True):
            found[place] = one
    return found


def _add(variable: Any, figures: Any, bad_step: Any) -> None:
    before = tf.convert_to_tensor(variable)
    bad = tf.minimum(before[BAD_STEP], bad_step)
    variable.assign(tf.concat([before[:BAD_STEP] + figures, [bad]], 0))
