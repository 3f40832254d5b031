"""What is JAX's own: a runtime that starts once, arrays spread over devices, tracers, random keys, Flax."""

from __future__ import annotations

import subprocess
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jax.numpy", reason="JAX is not installed")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import eventually, run_python

from manyhands import jax as mh
from manyhands import machine
from manyhands.backends.jax import devices as backend
from manyhands.device import Device, Memory
from manyhands.errors import BadDevice, NoSuchDevice, NotATensor, SeveralDevices


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, where JAX has not started."""
    clean: dict[str, str | None] = {"MANYHANDS_VIRTUAL_DEVICES": None, "NPROC": None, "JAX_PLATFORMS": "cpu"}
    return run_python(program, **{**clean, **environment})


@pytest.fixture
def nnx() -> ModuleType:
    return pytest.importorskip("flax.nnx")


def spread(values: Any, devices: list[Any]) -> Any:
    return jax.device_put(values, NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data")))


# The runtime and virtual devices


@pytest.mark.once
def test_the_import_starts_nothing() -> None:
    done = run(
        "import jax\n"
        "from manyhands import jax as mh\n"
        "jax.config.update('jax_num_cpu_devices', 5)\n"  # JAX refuses once it has started
        "assert len(jax.devices('cpu')) == 5 and mh.num_gpus() == 0"
    )
    assert done.returncode == 0, done.stderr


LATE = """
import jax
from manyhands import jax as mh
from manyhands.errors import VirtualDevicesError
{before}
jax.numpy.ones(1).block_until_ready()
try:
    mh.virtual_devices(2)
except VirtualDevicesError as error:
    assert mh.num_gpus() == 0
    print(error)
"""


@pytest.mark.once
@pytest.mark.parametrize("before", ["", "jax.config.update('jax_num_cpu_devices', 2)"])
def test_virtual_devices_that_come_too_late_are_refused(before: str) -> None:
    done = run(LATE.format(before=before))
    assert "MANYHANDS_VIRTUAL_DEVICES=2 before Python starts" in done.stdout, done.stderr
    assert "mh.virtual_devices(2) before the first array" in done.stdout


@pytest.mark.once
def test_a_number_that_the_user_has_set_himself_is_fine() -> None:
    done = run(
        "import jax, os\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "from manyhands import jax as mh\n"
        "assert mh.virtual_devices(2) == jax.devices('cpu') == mh.try_all_gpus()\n"
        "assert int(os.environ['NPROC']) >= 8\n"
        "assert mh.virtual_devices(2) == jax.devices('cpu')"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.once
def test_a_large_pool_of_threads_stays() -> None:
    done = run(
        "from manyhands import jax; import os; print(os.environ['NPROC'])", MANYHANDS_VIRTUAL_DEVICES="2", NPROC="999"
    )
    assert done.stdout.strip() == "999", done.stderr


TRAINING = """
from manyhands import jax as mh
import os, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(mh.try_all_gpus()), ("data",))
x = jax.device_put(np.ones((64, 32), np.float32), NamedSharding(mesh, PartitionSpec("data")))
weight = jax.device_put(np.full((32, 32), 0.01, np.float32), NamedSharding(mesh, PartitionSpec()))

@jax.jit
def step(weight, x):
    loss, gradient = jax.value_and_grad(lambda weight: jnp.mean(jnp.tanh(x @ weight) ** 2))(weight)
    return weight - 0.1 * gradient, loss

for _ in range(800):
    weight, loss = step(weight, x)
mh.synchronize()
print(os.environ["NPROC"], len(loss.devices()), bool(jnp.isfinite(loss)))
"""


@pytest.mark.once
def test_training_that_never_waits_does_not_deadlock() -> None:
    """With XLA's own number of threads this hangs on two cores: see ``virtual_devices`` in the adapter."""
    done = run(TRAINING, MANYHANDS_VIRTUAL_DEVICES="2", NPROC="3")
    assert done.stdout.split() == ["8", "2", "True"], done.stderr[-2000:]


# Devices


def test_neutral_names() -> None:
    virtual = backend.virtual_count()
    assert backend.neutral(mh.cpu()) == (Device("virtual", 0) if virtual else Device("cpu"))
    assert backend.neutral(mh.try_all_gpus()[-1]).index == max(0, mh.num_gpus() - 1)
    with pytest.raises(BadDevice, match="tpu"):
        backend.neutral(SimpleNamespace(platform="tpu", id=0))


def test_platforms_without_a_cpu_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_devices", lambda platform: [])
    with pytest.raises(NoSuchDevice, match="JAX_PLATFORMS=cuda,cpu"):
        mh.cpu()


def test_the_record_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = machine.GpuFacts(0, "GPU-7", "Card", Memory(100, 60), None, None, "9.0", "1")
    monkeypatch.setattr(machine, "gpus", lambda: [card])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = SimpleNamespace(platform="gpu", id=0, local_hardware_id=0, device_kind="Card", compute_capability="9.0")
    device.memory_stats = lambda: {"bytes_limit": 75, "bytes_in_use": 5}
    record = backend.describe(device)
    assert (record.device, record.name, record.uuid, record.capability) == (Device("gpu"), "Card", "GPU-7", "9.0")
    assert record.memory == Memory(75, 70)
    device.memory_stats = lambda: None
    assert backend.describe(device).memory == Memory(100, 60)


# Arrays


def test_an_array_spread_over_devices_has_no_one_device(two: list[Any]) -> None:
    x = spread(np.arange(8.0, dtype=np.float32), two)
    assert not any(backend.is_on(x, device) for device in two)
    with pytest.raises(SeveralDevices, match=r"(virtual|gpu):0, (virtual|gpu):1"):
        mh.device_of(x)
    whole = mh.to(x, two[1])
    assert mh.device_of(whole) == two[1]
    assert np.asarray(whole).tolist() == list(range(8))
    assert mh.device_of(mh.copy(x, two[0])) == two[0]
    assert mh.to(x, two[0], wait=False).result().devices() == {two[0]}
    with pytest.raises(SeveralDevices, match=r"batch\['x'\]: an array of shape \(8,\)"):
        mh.check_same_device(y=whole, batch={"x": x})
    assert [np.asarray(shard).tolist() for shard in mh.split(x, two)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_sharding_is_a_place(two: list[Any]) -> None:
    rows = NamedSharding(Mesh(np.array(two), ("rows",)), PartitionSpec("rows"))
    x = jnp.arange(8.0).reshape(4, 2)
    spread_out = mh.to({"x": x}, rows)["x"]
    assert spread_out.sharding == rows
    assert mh.to(spread_out, rows) is spread_out
    assert mh.to(x, rows, wait=False).result().sharding == mh.copy(x, rows).sharding == rows
    shards = mh.split(spread_out, two)
    assert [mh.device_of(shard) for shard in shards] == two
    for place in (two[1], rows):
        np.testing.assert_array_equal(mh.gather(shards, place), x)
        np.testing.assert_array_equal(mh.to(mh.to(spread_out, place), two[0]), x)
    with pytest.raises(BadDevice, match="spreads an array over 2 devices, and one device is needed here"):
        mh.split(x, [rows])


def test_shards_stay_where_they_are_put(two: list[Any]) -> None:
    with jax.default_device(two[0]):
        batch = jnp.arange(4.0)  # on its device only by default
    shards = mh.split(batch, two)
    assert [shard.committed for shard in shards] == [True, True]
    with pytest.raises(ValueError, match="incompatible devices"):
        shards[0] + shards[1]


def test_a_sharding_over_one_device_is_that_device() -> None:
    device = mh.try_gpu()
    x = spread(np.ones(4, np.float32), [device])
    assert mh.device_of(x) == device
    assert mh.to(x, device) is x


def test_inside_jit_a_value_has_no_device() -> None:
    device = mh.try_gpu()
    for use in (
        mh.device_of,
        mh.copy,
        lambda x: mh.to(x, device),
        lambda x: mh.to({"x": x}, device),
        lambda x: mh.to(x, device, wait=False),
        lambda x: mh.check_same_device(x),
        lambda x: mh.split(x, mh.try_all_gpus(), shares=[1] * max(1, mh.num_gpus())),
        lambda x: mh.synchronize(),
    ):
        with pytest.raises(NotATensor, match="inside jit, grad or vmap"):
            jax.jit(use)(jnp.ones(3))


@pytest.mark.parametrize("make", [lambda: jax.random.key(3), lambda: jax.random.split(jax.random.key(3), 4)])
def test_random_keys_are_moved(make: Any) -> None:
    key = make()
    expected = jax.random.key_data(key).tolist()
    for device in [mh.cpu(), *mh.try_all_gpus()]:
        arrival = mh.to(key, device, wait=False)
        assert isinstance(arrival.ready(), bool)
        for moved in (mh.to(key, device), mh.copy(key, device), arrival.result()):
            assert mh.device_of(moved) == device
            assert jax.random.key_data(moved).tolist() == expected
        copied = mh.copy(moved)
        assert copied.unsafe_buffer_pointer() != moved.unsafe_buffer_pointer()


def test_random_keys_are_split_and_gathered() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    shards = mh.split(keys, mh.try_all_gpus())
    whole = mh.gather(shards, mh.cpu())
    assert jax.random.key_data(whole).tolist() == jax.random.key_data(keys).tolist()


def test_an_arrival_tells_when_it_is_there() -> None:
    arrival = backend.start_move(jnp.ones(1000), mh.try_all_gpus()[-1])
    assert eventually(arrival.ready)


def test_the_transfer_guard_has_nothing_against_it() -> None:
    x = jnp.ones(3)
    mh.synchronize()
    with jax.transfer_guard("disallow"):
        for device in mh.try_all_gpus():
            assert mh.device_of(mh.to(x, device)) == device
        mh.synchronize()


# Waiting


def test_synchronize_waits_for_work_whose_result_nobody_holds() -> None:
    for device in [mh.cpu(), *mh.try_all_gpus()]:
        finished: list[bool] = []

        def slow(x: Any, finished: list[bool] = finished) -> Any:
            time.sleep(0.3)
            finished.append(True)
            return x

        x = mh.to(np_ones(), device)
        jax.jit(lambda x, slow=slow: jax.pure_callback(slow, x, x))(x)
        mh.synchronize(device)
        assert finished


def np_ones() -> Any:
    return jax.device_put(np.ones(3, np.float32), mh.cpu())


def test_errors_of_asynchronous_work_surface() -> None:
    def fail(x: Any) -> Any:
        raise ValueError("late trouble")

    held = []

    def provoke() -> None:
        held.append(jax.jit(lambda x: jax.pure_callback(fail, x, x))(np_ones()))
        mh.synchronize(mh.cpu())

    with pytest.raises(RuntimeError, match="late trouble"):
        provoke()
    held.clear()
    mh.synchronize()


# Models


def network(nnx: ModuleType) -> Any:
    class Network(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.tied = self.layers[0].kernel
            self.scale = jnp.ones(4)

    return Network(nnx.Rngs(0))


def test_paths_of_nnx_modules(nnx: ModuleType) -> None:
    paths = [path for path, _ in backend.model_tensors(network(nnx))]
    assert {"layers.0.kernel", "layers.0.bias", "layers.1.mean", "scale", "dropout.rngs.key"} <= set(paths)
    assert len(paths) == len(set(paths))
    assert [path for path, _ in backend.model_tensors(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))] == ["bias", "kernel"]


def test_nnx_modules_are_moved_in_place(nnx: ModuleType, two: list[Any]) -> None:
    net = network(nnx)
    kernel = net.layers[0].kernel
    expected = np.asarray(kernel[...]).tolist()
    assert mh.to(net, two[1]) is net
    assert mh.device_of(net) == two[1]
    assert net.layers[0].kernel is kernel is net.tied
    assert np.asarray(kernel[...]).tolist() == expected
    assert mh.device_of(mh.to({"net": net, "n": 1}, two[0])) == two[0]
    before = kernel[...]
    mh.to(net, two[0])
    assert kernel[...] is before


def test_optimizers_follow(nnx: ModuleType, two: list[Any]) -> None:
    optax = pytest.importorskip("optax")
    optimizer = nnx.Optimizer(network(nnx), optax.adam(1e-3), wrt=nnx.Param)
    assert mh.device_of(mh.to(optimizer, two[1])) == two[1]
    state = optax.adam(1e-3).init({"w": jnp.ones(3)})
    assert mh.device_of(mh.to(state, two[1])) == two[1]


def test_an_abstract_module_has_no_device(nnx: ModuleType) -> None:
    abstract = nnx.eval_shape(lambda: network(nnx))
    assert list(backend.model_tensors(abstract)) == []
    assert mh.to(abstract, mh.try_gpu()) is abstract
    with pytest.raises(NotATensor):
        mh.device_of(abstract)


def test_trees_that_only_jax_knows_are_not_left_behind(nnx: ModuleType, two: list[Any]) -> None:
    from flax.core import freeze

    for tree in (nnx.state(network(nnx)), freeze({"params": {"kernel": jnp.ones(3)}}), nnx.Param(jnp.ones(3))):
        moved = mh.to(tree, two[1])
        assert type(moved) is type(tree)
        assert mh.device_of(moved) == two[1]
        assert mh.to(moved, two[1]) is moved


def test_measuring_stays_on_the_device() -> None:
    for device in mh.try_all_gpus():
        x = backend.random((8, 8), "bfloat16", device)
        assert (x.dtype, x.committed) == (jnp.bfloat16, True)
        assert mh.device_of(backend.matmul(x, x)) == device
