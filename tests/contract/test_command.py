"""The command, asked about the framework under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import run_command

from manyhands.cli import devices

pytestmark = pytest.mark.once


def test_json_is_what_the_documentation_says(framework: str, native: Any) -> None:
    result = run_command("devices", "--json", "--framework", framework, MANYHANDS_VIRTUAL_DEVICES="2")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["schema"] == devices.SCHEMA
    documented = (Path(__file__).parents[2] / "docs" / "devices-json.md").read_text()
    for name in _keys(facts):
        assert f"`{name}`" in documented, f"{name} is not described in docs/devices-json.md"
    (answer,) = facts["frameworks"]
    assert answer["virtual"] == 2
    assert [row["device"] for row in answer["devices"]] == ["cpu", "virtual:0", "virtual:1"]


def _keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for part in value.values() for key in _keys(part)}
    return {key for part in value for key in _keys(part)} if isinstance(value, list) else set()


@pytest.mark.neutral
def test_the_table_names_virtual_devices(framework: str, native: Any) -> None:
    result = run_command("devices", "--framework", framework, MANYHANDS_VIRTUAL_DEVICES="2")
    assert result.returncode == 0
    assert "virtual:1" in result.stdout
    assert "stand in for GPUs" in result.stdout
    assert "host: " in result.stdout


@pytest.mark.neutral
def test_a_framework_that_cannot_answer_is_named(framework: str, native: Any) -> None:
    result = run_command("devices", "--framework", framework, MANYHANDS_VIRTUAL_DEVICES="rubbish")
    assert result.returncode == 0
    assert f"{framework}: does not start" in result.stdout
    assert "rubbish" in result.stdout
