"""``parallel`` in TensorFlow: variables put back after a trial, random numbers, Keras, scopes, graphs as tasks."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

import keras
import numpy as np
import tensorflow as tf

from manyhands import tensorflow as mh
from manyhands.backends.runtime import Traced, call_of
from manyhands.backends.tensorflow import planning


def traced(function: Callable[..., Any], *arguments: Any) -> tuple[Traced, Any]:
    call = call_of(planning, function, arguments, {})
    assert call is not None
    return planning.trace(call), call


def test_operations_are_tasks_and_variables_are_memory() -> None:
    total = tf.Variable(tf.zeros((3, 3)))

    def function(x: Any) -> Any:
        y = tf.matmul(x, x)
        total.assign_add(y)
        return total + 1.0, tf.sin(x)

    found, call = traced(function, tf.ones((3, 3)))
    by_name = {task.name: task for task in found.tasks}
    assert {"MatMul", "AssignAddVariableOp", "ReadVariableOp", "AddV2", "Sin"} <= set(by_name)
    assert by_name["AssignAddVariableOp"].reads & by_name["MatMul"].writes
    assert by_name["ReadVariableOp"].reads & by_name["AssignAddVariableOp"].writes
    assert not by_name["Sin"].reads & by_name["MatMul"].writes
    assert [variable is total for variable in found.writes] == [True]
    assert found.run is not None
    assert np.allclose(found.run(call.tensors)[0], 4)


def test_a_function_is_not_tried_beyond_its_data() -> None:
    """It goes on at every call, as long as there are rows."""
    rows, position = tf.reshape(tf.range(12.0), (3, 4)), tf.Variable(0)

    def following(_: Any) -> Any:
        row = tf.gather(rows, position)
        position.assign_add(1)
        return tf.sin(row)

    fast = mh.parallel(following)
    for number in range(3):
        assert np.allclose(fast(tf.ones(2)), np.sin(rows[number]))
        assert "is not used: InvalidArgumentError" not in fast.explain()
    with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
        fast(tf.ones(2))


def test_a_training_step_updates_once_per_call() -> None:
    weight = tf.Variable(0.0)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((weight - x) ** 2)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    fast, x = mh.parallel(step), tf.ones(4)
    losses = [float(fast(x)) for _ in range(5)]
    after = float(weight)
    weight.assign(0.0)
    assert losses == pytest.approx([float(step(x)) for _ in range(5)], rel=1e-5)
    assert after == pytest.approx(float(weight), rel=1e-5)


def test_keras_models_with_dropout_and_statistics() -> None:
    def net() -> Any:
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()])
        made.build((None, 3))
        return made

    one, other = net(), net()
    fast, x = mh.parallel(lambda x: one(x, training=True)), tf.ones((8, 3))
    for _ in range(4):
        assert np.allclose(fast(x), other(x, training=True), rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(one.weights, other.weights, strict=True):
        assert np.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    whole = mh.parallel(one)
    assert np.allclose(whole(x), one(x))
    one.layers[0].kernel.assign_add(tf.ones((3, 4)))
    assert np.allclose(whole(x), one(x))


class Scaled(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.dense = 2.0, keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x) * self.scale


@pytest.mark.parametrize("make", [lambda: keras.layers.Dense(3), Scaled, lambda: keras.Sequential([Scaled()])])
def test_keras_layers_are_run_by_tf_function(make: Callable[[], Any]) -> None:
    layer, x = make(), tf.ones((2, 3))
    fast, closed = mh.parallel(layer), mh.parallel(lambda x: layer(x) + 1.0)
    for _ in range(3):  # the first call builds the layer
        assert np.allclose(fast(x), layer(x), rtol=1e-5, atol=1e-6)
        assert np.allclose(closed(x), layer(x) + 1.0, rtol=1e-5, atol=1e-6)
    for one in (fast, closed):
        assert "run as tf.function" in one.explain().splitlines()[0], one.explain()


def test_settings_of_layers_may_change() -> None:
    norm, scaled, x = keras.layers.BatchNormalization(), Scaled(), tf.random.stateless_normal((8, 3), (1, 2))
    fast = mh.parallel(lambda x: norm(scaled(x), training=True))
    for change in (lambda: setattr(scaled, "scale", 5.0), lambda: setattr(norm, "trainable", False)):
        for _ in range(3):
            fast(x)
        change()
        before = [variable.numpy() for variable in norm.variables]
        mine = fast(x)
        for variable, value in zip(norm.variables, before, strict=True):
            variable.assign(value)
        assert np.allclose(mine, norm(scaled(x), training=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x if tf.reduce_sum(x) > 0 else -x, "OperatorNotAllowedInGraphError"),
        (lambda x: x + tf.random.normal((3,)), "RandomStandardNormal"),
        (lambda x: x + float(x.numpy()[0]), "cannot trace"),
        (lambda x: (tf.print("seen"), x + 1)[1], "PrintV2"),
        (lambda x: tf.numpy_function(lambda a: a, [x], tf.float32), "PyFunc"),
        (lambda x: tf.RaggedTensor.from_row_lengths(x, [1, 2]), "a result is a RaggedTensor"),
    ],
)
def test_the_reason_is_told_and_plain_execution_used(function: Callable[..., Any], reason: str) -> None:
    fast = mh.parallel(function)
    for _ in range(2):
        fast(tf.ones(3))
    told = fast.explain()
    assert "plain execution" in told.splitlines()[0]
    assert reason in told


def test_random_numbers_are_those_of_plain_execution() -> None:
    fast = mh.parallel(lambda x: x + tf.random.normal((3,)))
    tf.random.set_seed(3)
    mine = [fast(tf.zeros(3)).numpy().tolist() for _ in range(3)]
    tf.random.set_seed(3)
    assert mine == [fast.function(tf.zeros(3)).numpy().tolist() for _ in range(3)]


def test_an_error_at_run_time_is_plain_executions() -> None:
    fast = mh.parallel(lambda x, at: tf.gather(x, at) * 2.0 + 1.0)
    x = tf.ones(3)
    for _ in range(2):
        assert fast(x, tf.constant([1])).numpy().tolist() == [3]
    with pytest.raises(tf.errors.InvalidArgumentError) as plain:
        fast.function(x, tf.constant([7]))
    with pytest.raises(tf.errors.InvalidArgumentError) as mine:
        fast(x, tf.constant([7]))
    assert str(mine.value) == str(plain.value)


def test_scopes_around_the_call_and_inside_it_are_kept() -> None:
    if mh.num_gpus() < 2:
        pytest.skip("needs two devices: MANYHANDS_VIRTUAL_DEVICES=3")
    fast = mh.parallel(lambda x: x * 2.0 + 1.0)
    x = tf.ones(3)
    for _ in range(2):
        for device in (mh.gpu(0), mh.gpu(1)):
            with device:
                assert mh.device_of(fast(x)) == device

    def both(x: Any) -> Any:
        with mh.gpu(0):
            first = tf.matmul(x, x)
        with mh.gpu(1):
            return first, tf.matmul(x, x) + 1.0

    square = tf.ones((3, 3))
    found, _ = traced(both, square)
    assert {(task.name, task.device) for task in found.tasks if task.name == "MatMul"} == {
        ("MatMul", "virtual:0"),
        ("MatMul", "virtual:1"),
    }
    fast = mh.parallel(both)  # tf.function would give both on the first device
    for _ in range(2):
        assert [mh.device_of(one) for one in fast(square)] == [mh.gpu(0), mh.gpu(1)]
    with mh.gpu(1), mh.parallel(threads=2):
        assert mh.device_of(mh.task(lambda: tf.ones(3) + 1)().result()) == mh.gpu(1)


def test_inside_tf_function_and_under_a_tape_it_is_the_function() -> None:
    fast = mh.parallel(lambda x: tf.reduce_sum(x**2))
    x = tf.Variable([1.0, 2.0])
    assert float(tf.function(lambda: fast(x * 1.0))()) == 5
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = fast(x * 1.0)
        assert tape.gradient(loss, x).numpy().tolist() == [2, 4]


def test_arguments_are_not_kept_alive() -> None:
    fast = mh.parallel(lambda x: x * 2.0 + 1.0)
    x = tf.ones(3)
    gone = weakref.ref(x)
    fast(x)
    del x
    gc.collect()
    assert gone() is None
