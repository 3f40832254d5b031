"""Naming and finding devices: the same in every framework, and each reads what another one prints."""

from __future__ import annotations

import os
from typing import Any

import pytest
from support import run_python

from manyhands import Device
from manyhands.errors import BadDevice, NoSuchDevice, VirtualDevicesError
from manyhands.placement.moves import VIRTUAL_DEVICES, Placement

VIRTUAL = int(os.environ.get(VIRTUAL_DEVICES) or 0)
needs_virtual_devices = pytest.mark.skipif(not VIRTUAL, reason="no virtual devices in this run")


def test_try_gpu_falls_back_to_the_cpu(mh: Any) -> None:
    assert mh.try_gpu(1000) == mh.cpu()
    if mh.num_gpus():
        assert mh.try_gpu() == mh.gpu(0)
    else:
        assert mh.try_gpu() == mh.cpu()
        assert mh.try_all_gpus() == [mh.cpu()]


def test_devices_are_native_and_known_again(mh: Any, native: Any) -> None:
    for device in [mh.cpu(), *mh.try_all_gpus()]:
        assert native.backend.is_device(device)
    assert len({str(device) for device in mh.try_all_gpus()}) == max(1, mh.num_gpus())


def test_records_tell_name_and_memory(mh: Any) -> None:
    records = mh.devices()
    assert len({record.device for record in records}) == len(records) >= 1
    for record in records:
        assert record.name
        assert record.kind in ("cpu", "gpu", "virtual")
        assert 0 <= record.memory.free <= record.memory.total > 2**20


def test_memory_takes_names_and_devices(mh: Any) -> None:
    assert mh.memory(mh.cpu()).total == mh.memory("cpu").total == mh.memory(Device("cpu")).total


@pytest.mark.parametrize("index", [-1, 1.5, "0", None, True])
def test_a_number_that_is_none_is_refused(mh: Any, index: Any) -> None:
    with pytest.raises(BadDevice):
        mh.gpu(index)


@pytest.mark.parametrize("name", ["gpu:x", "gpu:-1", "", "tpu", "gpu:1:2", "cpu:99"])
def test_a_name_that_is_none_is_refused(mh: Any, native: Any, name: str) -> None:
    with pytest.raises(BadDevice):
        mh.to(native.tensor([1.0]), name)


def test_a_gpu_that_is_not_there_has_a_name_but_no_use(mh: Any, native: Any, framework: str) -> None:
    """As in the book: ``gpu(i)`` names a device, ``try_gpu(i)`` falls back. Every ``jax.Device`` exists."""
    if framework != "jax":
        assert native.backend.is_device(mh.gpu(99))
        return
    with pytest.raises(NoSuchDevice, match="there is no"):
        mh.gpu(99)


@pytest.mark.parametrize("nothing", [[], {}, "text"], ids=str)
def test_a_device_that_is_not_there_is_refused_also_for_nothing(mh: Any, nothing: Any) -> None:
    with pytest.raises(NoSuchDevice):
        mh.to(nothing, "gpu:99")


@pytest.mark.parametrize("count", [0, 65, 10**9, -2, "2", 1.5])
def test_a_silly_number_of_virtual_devices_is_refused(mh: Any, count: Any) -> None:
    with pytest.raises(VirtualDevicesError, match="ask for 1 to 64"):
        mh.virtual_devices(count)


@needs_virtual_devices
def test_the_number_of_virtual_devices_cannot_change(mh: Any) -> None:
    assert mh.virtual_devices(VIRTUAL) == mh.try_all_gpus()
    assert len(mh.try_all_gpus()) == mh.num_gpus() == VIRTUAL
    with pytest.raises(VirtualDevicesError, match="new process"):
        mh.virtual_devices(VIRTUAL + 1)


# Names


def test_a_framework_lists_the_cpu_and_then_the_others(mh: Any) -> None:
    names = [str(record.device) for record in mh.devices()]
    kind = "virtual" if VIRTUAL else "gpu"
    assert names == ["cpu", *(f"{kind}:{number}" for number in range(mh.num_gpus()))]


def test_a_framework_reads_what_it_lists(mh: Any, native: Any) -> None:
    x = native.tensor([1.0, 2.0])
    for record in mh.devices():
        moved = mh.to(x, str(record.device))
        assert mh.to(moved, record.device) is moved
        assert mh.memory(str(record.device)).total > 0


@needs_virtual_devices
def test_all_names_of_a_virtual_device_are_read(mh: Any, native: Any) -> None:
    """A tensor on virtual:1 says cpu:1 in PyTorch, cpu(1) in MXNet and /device:CPU:1 in TensorFlow."""
    x = native.tensor([1.0, 2.0])
    there = mh.to(x, "virtual:1")
    for name in ("gpu:1", "cuda:1", "cpu:1", "cpu(1)", "/device:CPU:1", mh.gpu(1)):
        assert mh.to(there, name) is there
    if native.framework != "jax":  # which prints TFRT_CPU_1, an internal name
        assert mh.to(there, str(mh.device_of(there))) is there


def test_devices_are_printed_by_their_common_names(mh: Any, native: Any) -> None:
    names = Placement(native.backend).names
    assert names(["cpu"]) == names([Device("cpu")]) == names(["CPU:0"]) == ["cpu"]
    if not VIRTUAL:
        assert names([mh.cpu()]) == ["cpu"]
        return
    for devices in (["virtual:0", "virtual:1"], ["gpu:0", "cuda:1"], [mh.gpu(0), mh.gpu(1)], [Device("gpu"), "cpu:1"]):
        assert names(devices) == ["virtual:0", "virtual:1"]
    # PyTorch alone has the host beside virtual device 0.
    first = "cpu" if native.backend.CAPABILITIES.host_beside_virtual else "virtual:0"
    assert names(["cpu", "virtual:1"]) == [first, "virtual:1"]


NATIVE = {
    "jax": (
        "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
        "import jax; second = lambda: jax.devices('cpu')[1]"
    ),
    "tensorflow": (
        "import tensorflow as tf; host = tf.config.list_physical_devices('CPU')[0]\n"
        "tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * 2)\n"
        "second = lambda: '/device:CPU:1'"
    ),
    "mxnet": "import mxnet as mx; second = lambda: mx.cpu(1)",
}


@pytest.mark.once
def test_cpus_that_the_user_has_made_are_virtual_devices(framework: str) -> None:
    """By the framework's own means, without asking manyhands for them."""
    if framework not in NATIVE:
        pytest.skip("PyTorch has no CPUs of its own besides the host")
    code = NATIVE[framework] + (
        f"\nfrom manyhands import {framework} as mh\nfrom manyhands.backends.{framework} import devices as backend\n"
        "from manyhands.placement.moves import Placement\nplace = Placement(backend)\n"
        "print(place.names(place.distinct([mh.cpu(), second()])))\n"
    )
    if framework != "mxnet":  # which has any number of them, but knows by name those that were asked for
        code += "assert place.find_name('virtual:1') == place.find_name('cpu:1') == second()"
    done = run_python(code, MANYHANDS_VIRTUAL_DEVICES=None)
    assert done.stdout.splitlines()[-1:] == ["['virtual:0', 'virtual:1']"], done.stderr
