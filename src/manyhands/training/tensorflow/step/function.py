"""A Keras model as a function of all that it holds.

A model has one set of variables, and each replica needs its own. So only the model's layers are used: within a
``keras.StatelessScope`` every variable has the replica's value, and what layers write to their variables (running
statistics, weights that a layer normalises) is returned as new values. The caller's model does not change, and no model
has to be cloned. Random layers draw from seeds that are computed from (seed, step, replica), so a resumed job draws the
same numbers.

Within the model's layers and its loss the number of replicas reads 1. Keras's losses (and
``tf.nn.compute_average_loss``) divide by that number, because Keras adds up the replicas' losses; the step weighs each
part of a batch by its samples, so they would divide twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from tensorflow.python.distribute import distribute_lib

from manyhands.training.data.sources import Batch
from manyhands.training.evaluation.inputs import Inputs
from manyhands.training.tensorflow.loss import batch_parts
from manyhands.training.tensorflow.loss.keras_losses import Losses
from manyhands.training.tensorflow.objective import Objective, widened

_OF_EVERY_MODEL = frozenset(vars(keras.Model())) | frozenset(vars(keras.Layer()))


class Function:
    """The loss of a model as a function of weights, statistics, a seed and a batch."""

    def __init__(self, model: Any, objective: Objective, seed: int) -> None:
        self.model, self.objective = model, objective
        self.inputs: Inputs | None = None  # for predictions, of data that may have no targets
        self.unknown = list(_unknown_variables(model))
        self.trained: list[Any] = list(model.trainable_variables)
        trained = {id(variable) for variable in self.trained}
        self.statistics = [variable for variable in model.weights if id(variable) not in trained]
        # Layers without a generator use Keras's global one, and every thread has another of these.
        self._unseeded = keras.random.SeedGenerator(0)
        weights = {id(variable) for variable in model.weights}
        self._generators = [v for v in model.variables if id(v) not in weights] + [self._unseeded.state]
        keys = np.random.SeedSequence(seed).generate_state(2 * len(self._generators), np.uint32)
        self._keys = keys.astype(np.int64).astype(np.int32).reshape(-1, 2)

    def __call__(
        self, weights: Sequence[Any], statistics: Sequence[Any], numbers: Sequence[Any], batch: Batch, *, training: bool
    ) -> tuple[Losses, tuple[list[Any], list[Any]]]:
        """The loss, regularizers and ``add_loss`` included, and the weights and statistics after it.

        ``numbers`` (of the step, the replica and the like) seed the random numbers of this call.
        """
        with self._within(weights, statistics, numbers) as scope:
            losses = self.objective(self.model, batch, training=training)
            if not losses.complete:
                losses = sum((Losses(_penalty(loss)) for loss in self.model.losses), losses)
        weights, statistics = (
            [scope.get_current_value(variable) for variable in variables]
            for variables in (self.trained, self.statistics)
        )
        return losses, (weights, statistics)

    def output(self, weights: Sequence[Any], statistics: Sequence[Any], numbers: Sequence[Any], batch: Batch) -> Any:
        """The model's output for a batch with or without targets, in evaluation mode and full precision."""
        with self._within(weights, statistics, numbers):
            inputs = batch_parts.inputs_of(self.model, batch, self.inputs)
            return widened(batch_parts.checked_output(self.model, batch_parts.Parts(inputs, ()), training=False))

    @contextlib.contextmanager
    def _within(self, weights: Sequence[Any], statistics: Sequence[Any], numbers: Sequence[Any]) -> Iterator[Any]:
        """Within it the model has these values, and its random numbers are seeded by ``numbers``."""
        mapping = [*zip(self.trained, weights, strict=True), *zip(self.statistics, statistics, strict=True)]
        mapping += zip(self._generators, self._seeds(numbers), strict=True)
        scope = _Scope(state_mapping=mapping, collect_losses=True, initialize_variables=False)
        with self._own_generator(), _as_one_replica(), scope:
            yield scope

    def _seeds(self, numbers: Sequence[Any]) -> Iterator[Any]:
        for key, generator in zip(self._keys, self._generators, strict=True):
            state = tf.constant(key)
            for number in numbers:
                state = tf.random.experimental.stateless_fold_in(state, tf.cast(number, tf.int32))
            yield tf.cast(tf.bitcast(state, tf.uint32), generator.dtype)

    @contextlib.contextmanager
    def _own_generator(self) -> Iterator[None]:
        before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, self._unseeded)
        try:
            yield
        finally:
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)


class _Scope(keras.StatelessScope):  # type: ignore[misc]
    """The gradient of a weight that was assigned is that of its uses, not of what was assigned: as with variables."""

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        before = self.get_current_value(variable)
        follows = before is not None and before.dtype.is_floating
        super().add_update((variable, _assigned(before, value) if follows else value))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _assigned(before: Any, value: Any) -> Any:
    return tf.identity(value), lambda upstream: (upstream, None)


def _own_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Layers of the user's own classes, each by its class and name."""
    for layer in model._flatten_layers():
        if not type(layer).__module__.startswith(("keras.", "manyhands.")):
            same = layer is model
            yield type(layer).__name__ if same else f"{type(layer).__name__}({layer.name!r})", layer


def _unknown_variables(model: Any) -> Iterator[tuple[str, Any]]:
    """Variables of TensorFlow's that Keras does not know: a stateless scope does not reach them."""
    for path, layer in _own_layers(model):
        for name, value in vars(layer).items():
            if name not in _OF_EVERY_MODEL and isinstance(value, tf.Variable):
                yield f"{path}.{name}", value


def _penalty(value: Any) -> Any:
    """As Keras adds it: a sum, whatever its shape."""
    return tf.reduce_sum(value if value.dtype.is_floating else tf.cast(value, keras.config.floatx()))


@contextlib.contextmanager
def _as_one_replica() -> Iterator[None]:
    """Within it the number of replicas reads 1; replicas still exchange synchronized statistics."""
    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        yield
        return
    # TensorFlow has no public way to say so. Tried with 2.21.
    mode = distribute_lib._ThreadMode(distribute_lib._get_default_strategy(), None, replica)
    distribute_lib._push_per_thread_mode(mode)
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()
