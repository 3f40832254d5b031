"""Naming and finding devices: the same in every framework."""

from __future__ import annotations

import os
from typing import Any

import pytest

from manyhands import Device
from manyhands.errors import BadDevice, NoSuchDevice, VirtualDevicesError

VIRTUAL = int(os.environ.get("MANYHANDS_VIRTUAL_DEVICES") or 0)


def test_the_number_of_gpus_is_what_was_asked_for(mh: Any) -> None:
    if not VIRTUAL:
        pytest.skip("no virtual devices in this run")
    assert mh.num_gpus() == VIRTUAL
    assert len(mh.try_all_gpus()) == VIRTUAL


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
    assert sum(record.kind in ("gpu", "virtual") for record in records) == mh.num_gpus()


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
    message = rf"there is no (gpu|virtual):99: {framework} sees cpu.*mh\.try_gpu\(99\) falls back to the CPU"
    if framework == "jax":
        with pytest.raises(NoSuchDevice, match=message):
            mh.gpu(99)
    else:
        missing = mh.gpu(99)
        assert native.backend.is_device(missing)
        for use in (lambda: mh.to(native.tensor([1.0]), missing), lambda: mh.memory(missing)):
            with pytest.raises(NoSuchDevice, match=message):
                use()
    assert mh.try_gpu(99) == mh.cpu()


def test_a_device_that_is_not_there_is_refused_when_used(mh: Any, native: Any) -> None:
    x = native.tensor([1.0])
    with pytest.raises(NoSuchDevice, match=r"gpu:99|virtual:99"):
        mh.to(x, mh.gpu(99))
    with pytest.raises(NoSuchDevice, match="try_gpu"):
        mh.to(x, "gpu:99")
    with pytest.raises(NoSuchDevice):
        mh.to(x, "virtual:99")
    for nothing in ([], {}, "text"):
        with pytest.raises(NoSuchDevice):
            mh.to(nothing, "gpu:99")
    with pytest.raises(NoSuchDevice):
        mh.memory("gpu:99")


@pytest.mark.parametrize("count", [0, 65, 10**9, -2, "2", 1.5])
def test_a_silly_number_of_virtual_devices_is_refused(mh: Any, count: Any) -> None:
    with pytest.raises(VirtualDevicesError, match="ask for 1 to 64"):
        mh.virtual_devices(count)


def test_the_number_of_virtual_devices_cannot_change(mh: Any) -> None:
    if not VIRTUAL:
        pytest.skip("no virtual devices in this run")
    assert mh.virtual_devices(VIRTUAL) == mh.try_all_gpus()
    with pytest.raises(VirtualDevicesError, match="new process"):
        mh.virtual_devices(VIRTUAL + 1)
