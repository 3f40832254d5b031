"""How fast a device is, for predictions without it: its measured speeds.

They are what ``manyhands devices --measure --json`` prints on a machine. What it does not measure (launching an
operation, the shortest kernel) stands under ``audit`` in those of an H200 that ships with the package, and is
taken from there.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from manyhands.errors import BadSettings


@dataclass(frozen=True)
class DeviceSpeeds:
    """A device's figures; bandwidths in bytes per second, rates in FLOP per second, times in seconds."""

    name: str
    to_device: float
    to_device_pinned: float
    to_host: float
    to_host_pinned: float
    on_device: float
    float32: float
    bfloat16: float
    launch: float
    kernel: float


@functools.cache
def h200() -> DeviceSpeeds:
    """The H200's, as measured for docs/how/measurements.md."""
    return _read(_shipped_speeds(), "h200.json")


def load(path: Path) -> DeviceSpeeds:
    """The speeds in a file that ``manyhands devices --measure --json`` has written."""
    try:
        facts = json.loads(path.read_text())
        if not isinstance(facts, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise BadSettings(f"--speeds {path} is not of `manyhands devices --measure --json`: {error}") from None
    return _read(facts, str(path))


def _shipped_speeds() -> dict[str, Any]:
    text = resources.files("manyhands.audit").joinpath("profiles/h200.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]


def _read(facts: dict[str, Any], name: str) -> DeviceSpeeds:
    device = _measured_gpu(facts)
    if device is None:
        raise BadSettings(
            f"--speeds {name} has no measured GPU: run `manyhands devices --measure --json` on a machine with a GPU"
        )
    speed = device["speed"]
    extra = {**_shipped_speeds()["audit"], **facts.get("audit", {})}

    def figure(key: str, unit: float, otherwise: str | None = None) -> float:
        value = speed.get(key) or (speed.get(otherwise) if otherwise else None)
        if not isinstance(value, (int, float)) or value <= 0:
            raise BadSettings(f"--speeds {name} has no figure {key!r}: measure it with `manyhands devices --measure`")
        return float(value) * unit

    return DeviceSpeeds(
        name=str(device.get("name") or name),
        to_device=figure("host_to_device", 1e9),
        to_device_pinned=figure("host_to_device_pinned", 1e9, "host_to_device"),
        to_host=figure("device_to_host", 1e9),
        to_host_pinned=figure("device_to_host_pinned", 1e9, "device_to_host"),
        on_device=figure("device_to_device", 1e9),
        float32=figure("matmul_float32", 1e12),
        bfloat16=figure("matmul_bfloat16", 1e12, "matmul_float32"),
        launch=float(extra["launch_us"]) * 1e-6,
        kernel=float(extra["kernel_us"]) * 1e-6,
    )


def _measured_gpu(facts: dict[str, Any]) -> dict[str, Any] | None:
    rows = [
        row
        for framework in facts.get("frameworks") or []
        if isinstance(framework, dict)
        for row in framework.get("devices") or []
        if isinstance(row, dict) and row.get("kind") == "gpu" and isinstance(row.get("speed"), dict)
    ]
    return rows[0] if rows else None
