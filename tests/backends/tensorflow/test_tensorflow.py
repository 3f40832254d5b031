"""What is TensorFlow's own: names that are scopes, variables, soft placement, Keras."""

from __future__ import annotations

import copy
import pickle
import textwrap
from typing import Any

import pytest

pytest.importorskip("tensorflow.python", reason="TensorFlow is not installed")

import keras
import tensorflow as tf
from support import at_once, run_python

from manyhands import tensorflow as mh
from manyhands.backends.tensorflow import devices as backend
from manyhands.errors import (
    BadBatch,
    BadDevice,
    DeviceError,
    DeviceMismatch,
    NoSuchDevice,
    NotATensor,
    PlacementFailed,
    SeveralDevices,
)


def last() -> Any:
    """The device that differs most from the default one."""
    return mh.try_all_gpus()[-1]


# Devices


def test_a_device_is_a_name_and_a_scope() -> None:
    device = last()
    assert isinstance(device, str)
    with tf.device(device):
        assert mh.device_of(tf.constant([1.0])) == device
    with mh.try_gpu(mh.num_gpus() - 1 if mh.num_gpus() else 0) as entered:
        assert entered is not None
        assert mh.device_of(tf.constant([1.0])) == device
    for twin in (copy.deepcopy(device), pickle.loads(pickle.dumps(device))):
        assert backend.is_device(twin)
        assert twin == device


def test_tensorflows_own_names_are_devices(two: list[Any]) -> None:
    x, y = mh.to([tf.constant([1.0]), tf.constant([2.0])], two[1])
    for name in (str(two[1]), y.device):
        assert type(name) is str
        assert mh.to(x, name) is x
        assert mh.device_of(mh.to(tf.constant([1.0]), name)) == two[1]
        assert mh.device_of(mh.copy(x, name)) == two[1]
        assert mh.to([x, y], name)[0] is x
        assert mh.device_of(mh.gather(mh.split(tf.constant([1.0, 2.0]), [str(two[0]), name]), name)) == two[1]
        assert mh.memory(name).total > 0
        mh.synchronize(name)
    with pytest.raises(NoSuchDevice):
        mh.to(x, str(two[1])[:-1] + "99")
    with pytest.raises(BadDevice):
        mh.to(x, "/device:TPU:0")


def test_scopes_nest_and_come_back_after_an_error(two: list[Any]) -> None:
    where: list[Any] = []
    device = two[1]
    with device:
        with two[0], device, device:
            where.append(mh.device_of(tf.constant([1.0])))
        with pytest.raises(ValueError, match="on purpose"):
            leave_by_an_error(two[0])
        where.append(mh.device_of(tf.constant([1.0])))
    assert where == [two[1], two[1]]


def leave_by_an_error(device: Any) -> None:
    with device:
        raise ValueError("on purpose")


def test_one_device_is_a_scope_in_many_threads(two: list[Any]) -> None:
    def work(number: int) -> set[Any]:
        device, found = two[number % 2], set()
        for _ in range(50):
            with device, device:
                found.add(mh.device_of(tf.constant([1.0])))
        return found

    assert at_once(work, 4) == [{two[0]}, {two[1]}] * 2


def test_a_strategy_takes_our_devices(two: list[Any]) -> None:
    strategy = tf.distribute.MirroredStrategy(two, cross_device_ops=tf.distribute.ReductionToOneDevice())
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        net = keras.Sequential([keras.layers.Dense(2)])
        net.build((None, 3))
    with pytest.raises(SeveralDevices, match="replica 1"):
        mh.device_of(net)


def test_soft_placement_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = mh.gpu(99)
    with tf.device(missing):
        assert mh.device_of(tf.constant([1.0])) != missing  # TensorFlow says nothing
    with pytest.raises(NoSuchDevice):
        mh.to(tf.constant([1.0]), missing)
    monkeypatch.setattr(backend, "exists", lambda device: True)  # a device that has vanished since it was looked for
    for call in (mh.to, mh.copy):
        with pytest.raises(PlacementFailed, match="Does that device exist"):
            call(tf.constant([1.0]), missing)


TOO_LATE = """
    import tensorflow as tf
    tf.constant(1.0)
    from manyhands import tensorflow as mh
    from manyhands.errors import VirtualDevicesError
    try:
        mh.virtual_devices(2)
    except VirtualDevicesError as error:
        assert "before" in str(error) and "MANYHANDS_VIRTUAL_DEVICES=2" in str(error), error
        assert mh.num_gpus() == len(tf.config.list_logical_devices("GPU"))
    else:
        raise SystemExit("no error")
"""
ALREADY_CONFIGURED = """
    import tensorflow as tf
    host = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.device("CPU:1"):
        x = tf.constant(1.0)
    from manyhands import tensorflow as mh
    assert str(mh._backend.neutral(mh.device_of(x))) == "virtual:1"
    assert mh.virtual_devices(2) == [mh.gpu(0), mh.gpu(1)]
    assert mh.device_of(x) == mh.gpu(1)
"""
LOOKING_STARTS_NOTHING = """
    from manyhands import tensorflow as mh
    mh.num_gpus(), mh.devices(), mh.try_all_gpus(), mh.memory("cpu")
    assert len(mh.virtual_devices(3)) == 3
    import tensorflow as tf
    assert len(tf.config.list_logical_devices("CPU")) == 3
"""


@pytest.mark.once
@pytest.mark.parametrize("program", [TOO_LATE, ALREADY_CONFIGURED, LOOKING_STARTS_NOTHING])
def test_virtual_devices_are_made_before_the_runtime_starts(program: str) -> None:
    done = run_python(textwrap.dedent(program), MANYHANDS_VIRTUAL_DEVICES=None)
    assert done.returncode == 0, done.stderr[-2000:]


# Tensors


DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "bool", "complex64", "string"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_moves_and_copies(dtype: str) -> None:
    for shape in ((), (3,), (0, 2)):
        x = tf.fill(shape, "a") if dtype == "string" else tf.cast(tf.ones(shape), dtype)
        for y in (mh.to(x, last()), mh.copy(x, last()), mh.copy(x)):
            assert y.dtype == x.dtype
            assert y.shape == x.shape
            assert tf.reduce_all(y == x)


def test_a_copy_is_not_the_same_memory_and_has_a_gradient() -> None:
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(mh.copy(x, last()) * mh.to(x, last()))
    assert tape.gradient(y, x).numpy().tolist() == [2.0, 4.0]


def test_a_variable_stays_and_gives_its_value(two: list[Any]) -> None:
    with two[1]:
        for made in (tf.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])):
            assert mh.device_of(made) == two[1]
            assert mh.to(made, two[1]) is made
            moved, duplicate = mh.to(made, two[0]), mh.copy(made)
            assert isinstance(moved, tf.Tensor)
            assert isinstance(duplicate, tf.Tensor)
            assert (mh.device_of(moved), mh.device_of(duplicate)) == (two[0], two[1])
            made.assign([5.0, 6.0])
            assert moved.numpy().tolist() == duplicate.numpy().tolist() == [1.0, 2.0]
            assert [mh.device_of(shard) for shard in mh.split(made, two)] == two


class Box(tf.experimental.ExtensionType):
    values: tf.Tensor


def composites() -> list[Any]:
    return [
        tf.ragged.constant([[1.0], [2.0, 3.0], []]),
        tf.sparse.from_dense([[0.0, 1.0], [2.0, 0.0]]),
        tf.IndexedSlices(tf.constant([[1.0, 2.0]]), tf.constant([0]), dense_shape=tf.constant([2, 2])),
        Box(tf.constant([1.0])),
    ]


def parts(composite: Any) -> list[Any]:
    return tf.nest.flatten(composite, expand_composites=True)


@pytest.mark.parametrize("kind", range(4))
def test_composite_tensors_are_moved_part_by_part(kind: int, two: list[Any]) -> None:
    x = mh.to(composites()[kind], two[0])
    moved = mh.to({"x": x, "y": tf.constant([1.0])}, two[1])["x"]
    for made, device in ((moved, two[1]), (mh.copy(x), two[0]), (mh.to(x, two[1], wait=False).result(), two[1])):
        assert type(made) is type(x)
        assert {mh.device_of(part) for part in parts(made)} == {mh.device_of(made)} == {device}
        assert all(tf.reduce_all(a == b) for a, b in zip(parts(made), parts(x), strict=True))
        assert made is not x
    assert mh.to(moved, two[1]) is moved
    assert mh.to([moved], two[1])[0] is moved
    with pytest.raises(DeviceMismatch, match="x: "):
        mh.check_same_device(x=x, y=moved)


def test_a_composite_on_two_devices_is_told(two: list[Any]) -> None:
    values, splits = mh.to(tf.constant([1.0, 2.0]), two[0]), mh.to(tf.constant([0, 1, 2], tf.int64), two[1])
    mixed = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    if len({mh.device_of(part) for part in parts(mixed)}) > 1:
        with pytest.raises(SeveralDevices, match="batch: a RaggedTensor"):
            mh.check_same_device(batch=mixed)
    assert mh.device_of(mh.to(mixed, two[1])) == two[1]


def test_ragged_tensors_are_cut_others_refused() -> None:
    ragged, *others = composites()
    devices = mh.try_all_gpus()[:2]
    shards = mh.split(ragged, devices)
    assert [mh.device_of(shard) for shard in shards] == devices
    assert mh.gather(shards, mh.cpu()).to_list() == [[1.0], [2.0, 3.0], []]
    for other in others:
        for call in (lambda: mh.split(other, devices), lambda: mh.gather([other, other], mh.cpu())):  # noqa: B023
            with pytest.raises(BadBatch, match="make it dense first"):
                call()


def test_inside_a_function_there_is_no_device_yet() -> None:
    variable = tf.Variable([1.0])
    home = mh.device_of(variable)

    @tf.function
    def step(x: Any) -> Any:
        for call in (mh.device_of, mh.copy, lambda y: mh.to(y, mh.cpu()), lambda y: mh.split(y, [mh.cpu()])):
            with pytest.raises(NotATensor, match=r"inside tf\.function"):
                call(x)
        assert mh.device_of(variable) == home
        return x + variable

    with last():
        assert mh.device_of(step(tf.constant([1.0]))) == last()


def test_errors_of_asynchronous_work_surface_at_synchronize() -> None:
    tf.config.experimental.set_synchronous_execution(False)
    try:
        tf.debugging.check_numerics(tf.constant([float("nan")]), "not a number")
        with pytest.raises(tf.errors.InvalidArgumentError, match="not a number"):
            mh.synchronize()
    finally:
        tf.experimental.async_clear_error()
        tf.config.experimental.set_synchronous_execution(True)
    mh.synchronize()


def test_our_moves_are_explicit_for_tensorflow_too(two: list[Any]) -> None:
    x = mh.to(tf.constant([1.0, 2.0]), two[0])
    tf.config.experimental.set_device_policy("explicit")
    try:
        y = mh.to(x, two[1])
        mh.copy(x, two[1])
        assert mh.gather(mh.split(y, two), two[1]).numpy().tolist() == [1.0, 2.0]
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.add(x, y)
    finally:
        tf.config.experimental.set_device_policy("silent")


def test_page_locked_memory_is_not_promised() -> None:
    assert not backend.CAPABILITIES.pins_memory
    with pytest.raises(DeviceError):
        backend.pin(tf.constant([1.0]))


# Models


class Twins(keras.Model):
    """Two layers of one name."""

    def __init__(self) -> None:
        super().__init__(name="twins")
        self.one = keras.layers.Dense(2, name="same")
        self.two = keras.layers.Dense(2, name="same")

    def call(self, x: Any) -> Any:
        return self.two(self.one(x))


class Plain(tf.Module):
    def __init__(self) -> None:
        self.weight = tf.Variable([1.0])
        self.more = [tf.Variable(1, trainable=False), {"key": tf.Variable(2.0)}]
        self.layer = keras.layers.Dense(2, name="dense_of_plain")
        self.layer.build((None, 2))


def test_weights_have_readable_and_unique_paths() -> None:
    net = keras.Sequential([keras.layers.Dense(2, name="first"), keras.layers.BatchNormalization(name="norm")])
    net.build((None, 3))
    whole = net.name
    kinds = ["first/kernel", "first/bias", "norm/gamma", "norm/beta", "norm/moving_mean", "norm/moving_variance"]
    assert sorted(path for path, _ in backend.model_tensors(net)) == sorted(f"{whole}/{kind}" for kind in kinds)
    twins = Twins()
    twins(tf.zeros((1, 2)))
    paths = [path for path, _ in backend.model_tensors(twins)]
    assert len(set(paths)) == len(paths) == 4
    assert "twins/same/kernel (2)" in paths
    assert {path for path, _ in backend.model_tensors(Plain())} == {
        "weight",
        "more.0",
        "more.1.key",
        "layer.dense_of_plain/kernel",
        "layer.dense_of_plain/bias",
    }


def test_a_model_stays_where_it_was_built(two: list[Any]) -> None:
    with two[1]:
        net = keras.Sequential([keras.layers.Dense(2)])
        net.build((None, 3))
    assert mh.device_of(net) == two[1]
    assert mh.to(net, two[1]) is net
    with pytest.raises(NotATensor, match=r"with mh\.cpu\(\):"):
        mh.to(net, two[0] if two[0] == mh.cpu() else mh.cpu())


def test_a_model_that_is_not_built_has_no_device_and_promises_none() -> None:
    net = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(NotATensor, match="not made yet"):
        mh.device_of(net)
    with pytest.raises(NotATensor, match="build it there"):
        mh.to(net, last())
    assert mh.to(tf.Module(), last()) is not None
