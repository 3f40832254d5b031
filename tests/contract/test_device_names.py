"""Devices have the same names in every framework, and each framework reads what another one prints."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from manyhands import Device
from manyhands.placement.moves import VIRTUAL_DEVICES, Placement

VIRTUAL = int(os.environ.get(VIRTUAL_DEVICES) or 0)


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


@pytest.mark.skipif(not VIRTUAL, reason="no virtual devices in this run")
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
    environment = {name: value for name, value in os.environ.items() if name != VIRTUAL_DEVICES}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.splitlines()[-1:] == ["['virtual:0', 'virtual:1']"], done.stderr
