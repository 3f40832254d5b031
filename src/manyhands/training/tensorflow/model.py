"""A Keras model as a function of all that it holds; its precision; stable names for its weights.

A model has one set of variables, and each replica needs its own. So only the model's layers are used: within a
``keras.StatelessScope`` every variable has the replica's value, and what layers write to their statistics is returned
as new values. The caller's model does not change, and no model has to be cloned. Random layers draw from seeds that
are computed from (seed, step, replica), so a resumed job draws the same numbers.

Within the model's layers and its loss the number of replicas reads 1. Keras's losses (and
``tf.nn.compute_average_loss``) divide by that number, because Keras adds up the replicas' losses; the step weighs each
part of a batch by its samples, so they would divide twice.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from tensorflow.python.distribute import distribute_lib

from manyhands.errors import BadSettings, type_in_words
from manyhands.training.data.roles import ModelInputs
from manyhands.training.data.sources import Batch
from manyhands.training.tensorflow.losses import Losses
from manyhands.training.tensorflow.objective import Objective, inputs_of, output_of, widen

_POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp64": "float64"}
_NUMBER = re.compile(r"_\d+\Z")


class Function:
    """The loss of a model as a function of weights, statistics, a seed and a batch."""

    def __init__(self, model: Any, objective: Objective, seed: int) -> None:
        self.model, self.objective = model, objective
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
    ) -> tuple[Losses, list[Any]]:
        """The loss, regularizers and ``add_loss`` included, and the statistics after it.

        ``numbers`` (of the step, the replica and the like) seed the random numbers of this call.
        """
        with self._within(weights, statistics, numbers) as scope:
            before = dict(scope.state_mapping)
            losses = self.objective(self.model, batch, training=training)
            losses = sum((Losses(_penalty(loss)) for loss in self.model.losses), losses)
        for variable in self.trained:
            if scope.get_current_value(variable) is not before[id(variable)]:
                raise BadSettings(
                    f"{variable.path} is trained, and a layer assigns it in its call (as SpectralNormalization does): "
                    "here weights change by the optimizer alone, so that any number of devices makes the same update"
                )
        return losses, [scope.get_current_value(variable) for variable in self.statistics]

    def output(
        self,
        weights: Sequence[Any],
        statistics: Sequence[Any],
        numbers: Sequence[Any],
        batch: Batch,
        inputs: ModelInputs,
    ) -> Any:
        """The model's output for a batch with or without targets, in evaluation mode and full precision."""
        with self._within(weights, statistics, numbers):
            return widen(output_of(self.model, inputs_of(self.model, batch, inputs), training=False))

    @contextlib.contextmanager
    def _within(self, weights: Sequence[Any], statistics: Sequence[Any], numbers: Sequence[Any]) -> Iterator[Any]:
        """Within it the model has these values, and its random numbers are seeded by ``numbers``."""
        mapping = [*zip(self.trained, weights, strict=True), *zip(self.statistics, statistics, strict=True)]
        mapping += zip(self._generators, self._seeds(numbers), strict=True)
        scope = keras.StatelessScope(state_mapping=mapping, collect_losses=True, initialize_variables=False)
        generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, self._unseeded)
        try:
            with _as_one_replica(), scope:
                yield scope
        finally:
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)

    def _seeds(self, numbers: Sequence[Any]) -> Iterator[Any]:
        for key, generator in zip(self._keys, self._generators, strict=True):
            state = tf.constant(key)
            for number in numbers:
                state = tf.random.experimental.stateless_fold_in(state, tf.cast(number, tf.int32))
            yield tf.cast(tf.bitcast(state, tf.uint32), generator.dtype)


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


# Settings of layers for the time of a job


Change = tuple[Any, str, Any]  # a layer, the name of an attribute, and its value


@contextlib.contextmanager
def apply_changes(changes: Sequence[Change]) -> Iterator[None]:
    """Within it these attributes of layers have these values."""
    before = [(layer, name, getattr(layer, name)) for layer, name, _ in changes]
    try:
        for layer, name, value in changes:
            object.__setattr__(layer, name, value)
        yield
    finally:
        for layer, name, value in before:
            object.__setattr__(layer, name, value)


def of_precision(model: Any, precision: str) -> list[Change]:
    """The layers compute in that precision (``"auto"``: their own); the weights stay as they are."""
    if precision == "auto":
        return []
    policy = keras.DTypePolicy(_POLICIES[precision])
    if any("float" in weight.dtype and weight.dtype != policy.variable_dtype for weight in model.weights):
        raise BadSettings(
            f"precision={precision!r} needs weights in {policy.variable_dtype}, and {type_in_words(model)} has others: "
            f"write keras.config.set_dtype_policy({policy.name!r}) before the model is made"
        )
    return [(layer, "dtype_policy", policy) for layer in model._flatten_layers()]


def of_batch_stats(model: Any, batch_stats: str | None) -> list[Change]:
    """BatchNorm layers take statistics over all replicas, or over their own replica."""
    return [(layer, "synchronized", batch_stats == "global") for layer in batch_norms(model)]


def without_noise(model: Any) -> list[Change]:
    """Layers that mix or disturb samples in training do not: parts of a batch would then differ, and rightly."""
    noisy = [
        layer
        for layer in model._flatten_layers()
        if "Dropout" in type(layer).__name__ or isinstance(layer, keras.layers.GaussianNoise)
    ]
    changes: list[Change] = [(layer, "_trainable", False) for layer in batch_norms(model)]
    return changes + [(layer, name, 0.0) for layer in noisy for name in ("rate", "stddev") if hasattr(layer, name)]


def batch_norms(model: Any) -> list[Any]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def names(model: Any) -> list[str]:
    """A name for each of the model's weights, in their order; the same in every program that makes this model.

    Keras numbers layers as a program makes them: the second model's first dense layer may be ``dense_7``. The names
    here count from the beginning of the model, so that a checkpoint fits the same model in another program:
    ``sequential_2/dense_7/kernel`` and ``sequential_2/dense_8/kernel`` are ``dense/kernel`` and ``dense_1/kernel``.
    """
    paths = [variable.path.split("/") for variable in model.weights]
    if all(len(path) > 1 and path[0] == model.name for path in paths):
        paths = [path[1:] for path in paths]
    by_scope: dict[tuple[str, ...], str] = {}  # by the layers' own names, from the outermost
    numbers: Counter[tuple[str, ...]] = Counter()
    uses: Counter[str] = Counter()
    result = []
    for path in paths:
        for depth in range(1, len(path)):
            scope = tuple(path[:depth])
            if scope not in by_scope:
                kind = (*scope[:-1], _NUMBER.sub("", scope[-1]))
                by_scope[scope] = kind[-1] + (f"_{numbers[kind]}" if numbers[kind] else "")
                numbers[kind] += 1
        name = "/".join([*(by_scope[tuple(path[:depth])] for depth in range(1, len(path))), path[-1]])
        uses[name] += 1
        result.append(name if uses[name] == 1 else f"{name} ({uses[name]})")  # two layers may have the same name
    return result
