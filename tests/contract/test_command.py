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
@pytest.mark.parametrize(
    ("asked", "told"),
    [("2", ("virtual:1", "stand in for GPUs", "host: ")), ("rubbish", ("NAME: does not start", "rubbish"))],
)
def test_the_table_names_virtual_devices_and_who_cannot_answer(framework: str, asked: str, told: list[str]) -> None:
    result = run_command("devices", "--framework", framework, MANYHANDS_VIRTUAL_DEVICES=asked)
    assert result.returncode == 0
    assert all(words.replace("NAME", framework) in result.stdout for words in told), result.stdout
