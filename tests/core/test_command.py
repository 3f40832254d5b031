"""The command, as a user runs it."""

from __future__ import annotations

import pytest
from support import run_command

from manyhands import machine, measure
from manyhands.backends.fake import FakeBackend, FakeDevice
from manyhands.cli import devices, main


def test_help_and_version() -> None:
    assert "devices" in run_command().stdout
    assert run_command("--help").returncode == 0
    assert run_command("--version").stdout.startswith("manyhands ")


def test_an_unknown_command_is_refused() -> None:
    result = run_command("divices")
    assert result.returncode == 2
    assert "devices" in result.stderr


def test_no_framework_is_a_useful_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("manyhands.cli.probe.FRAMEWORKS", ())
    assert main(["devices"]) == 0
    shown = capsys.readouterr().out
    assert "host: " in shown
    assert "pip install 'manyhands[torch]'" in shown


def test_measuring_gives_every_figure() -> None:
    backend = FakeBackend(gpus=1)
    figures = dict(measure.speed(backend, FakeDevice("gpu", 0), megabytes=1))
    assert list(figures) == measure.steps() == list(devices._COLUMNS)
    assert figures["host_to_device"] > 0  # type: ignore[operator]
    assert figures["host_to_device_pinned"] is None
    assert figures["device_to_device"] > 0  # type: ignore[operator]
    assert dict(measure.speed(backend, backend.cpu(), megabytes=1))["host_to_device"] is None


def test_facts_of_the_host() -> None:
    host = machine.host()
    assert host.name
    assert 1 <= host.usable_cores <= host.cores
    assert 0 < host.memory.free <= host.memory.total


def test_gpus_are_found_or_explained() -> None:
    assert bool(machine.gpus()) == (machine.why_no_gpus() is None)


def test_visible_devices_renumber_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [machine.GpuFacts(i, f"GPU-{i}aaa", "H", machine.host_memory(), None, None, None, "1") for i in range(3)]
    monkeypatch.setattr(machine, "gpus", lambda: facts)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.visible_uuid(1) == "GPU-1aaa"
    assert machine.visible_uuid(3) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-0")
    assert [machine.visible_uuid(i) for i in range(3)] == ["GPU-2aaa", "GPU-0aaa", None]
