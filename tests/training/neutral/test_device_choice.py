"""What ``devices=`` and ``--devices`` mean, on machines with and without GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands import machine
from manyhands.device import Device
from manyhands.errors import BadDevice, NoSuchDevice
from manyhands.training import devices as device_choice
from manyhands.training.devices import DeviceChoice


class Machine:
    """A backend as far as devices are counted."""

    def __init__(self, gpus: int, virtual: int = 0) -> None:
        self.gpus, self.virtual = gpus, virtual

    def num_gpus(self) -> int:
        return self.virtual or self.gpus

    def virtual_count(self) -> int:
        return self.virtual

    def gpu(self, index: int) -> Device:
        return Device("virtual" if self.virtual else "gpu", index)

    def is_device(self, value: object) -> bool:
        return False


def resolved(devices: Any, gpus: int = 0, virtual: int = 0) -> DeviceChoice:
    return device_choice.resolve(devices, Machine(gpus, virtual), lambda count: {"devices": ["cpu"], "made": count})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _may_have_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "may_have_gpus", lambda: True)


@pytest.mark.parametrize("text", ["gpu", "GPU", " all ", "cuda", "auto", -1, "-1"])
def test_all_gpus_or_the_cpu(text: Any) -> None:
    assert resolved(text, gpus=2).devices == ["gpu:0", "gpu:1"]
    assert resolved(text).devices == ["cpu"]
    assert resolved(text, virtual=2).devices == [Device("virtual", 0), Device("virtual", 1)]


def test_the_fallback_to_the_cpu_is_said() -> None:
    assert resolved("gpu").note == "devices='gpu': there is no GPU here, so the job is on the CPU"
    assert resolved("all").note is resolved("auto").note is None
    assert "no GPU here" in str(resolved(-1).note)
    assert resolved("gpu", gpus=1).note is None


@pytest.mark.parametrize("number", [2, "2"])
def test_a_number_is_that_many(number: Any) -> None:
    assert resolved(number, gpus=3).devices == ["gpu:0", "gpu:1"]
    assert resolved(number) == DeviceChoice(["cpu"], {"made": 2})
    with pytest.raises(BadDevice, match=r"devices=.*2.*: 1 GPU here\. Give fewer, or 'cpu:2' for virtual CPU devices"):
        resolved(number, gpus=1)


def test_numbers_in_a_list_are_gpus() -> None:
    assert resolved([1, 0], gpus=2).devices == ["gpu:1", "gpu:0"]
    with pytest.raises(NoSuchDevice, match="there is no gpu:1 here"):
        resolved([0, 1], gpus=1)


def test_no_gpu_is_looked_for_where_the_machine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start JAX, which makes no CPU devices after that."""
    monkeypatch.setattr(machine, "may_have_gpus", lambda: False)
    monkeypatch.setattr(Machine, "num_gpus", lambda self: pytest.fail("started"))
    assert resolved(2).options == {"made": 2}


def test_devices_made_of_the_cpu() -> None:
    assert resolved("cpu:2") == DeviceChoice(["cpu"], {"made": 2})
    assert resolved("cpu") == resolved("cpu:1") == resolved("CPU:0") == DeviceChoice(["cpu"])
    with pytest.raises(BadDevice, match="devices='cpu:x': write cpu, or cpu:2"):
        resolved("cpu:x")


def test_names_are_those_of_a_list() -> None:
    assert resolved("gpu:0, cpu", gpus=1).devices == ["gpu:0", "cpu"]
    assert resolved("gpu:1", gpus=2).devices == ["gpu:1"]
    assert resolved("/GPU:0", gpus=1).devices == ["/GPU:0"]
    assert resolved("GPU:0", gpus=1).devices == ["GPU:0"]
    assert resolved("/CPU:0").devices == ["/CPU:0"]
    assert resolved(["gpu", "cpu:1"], gpus=1).devices == ["gpu", "cpu:1"]
    assert resolved(Device("gpu", 1)).devices == [Device("gpu", 1)]
    with pytest.raises(NoSuchDevice, match="devices='gpu:1': there is no gpu:1 here"):
        resolved("gpu:1", gpus=1)


@pytest.mark.parametrize("wrong", ["tpu", "", "gpu:x", 0, -2])
def test_what_is_none(wrong: Any) -> None:
    with pytest.raises(BadDevice, match="devices="):
        resolved(wrong, gpus=2)


def test_printed_names_of_virtual_devices_make_them_again() -> None:
    names = ["virtual:0", "virtual:1"]
    for devices in (names, tuple(names), "virtual:0,virtual:1", [Device("virtual", 0), Device("virtual", 1)]):
        assert resolved(devices) == resolved(devices, gpus=1) == DeviceChoice(["cpu"], {"made": 2})
    assert resolved(names, virtual=2) == resolved(names, virtual=3) == DeviceChoice(names), "they exist"
    assert resolved(names[1:]) == DeviceChoice(names[1:]), "not the first ones: an error when it is looked up"
