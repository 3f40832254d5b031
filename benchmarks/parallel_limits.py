"""Whether anything in a benchmark falls below what it must reach beside plain execution, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def below(ratios: Mapping[str, float], least: float, of: str) -> list[str]:
    """A line for each ratio that is below the least, or none; ``ratios`` are how many times as fast as plain."""
    return [f"below {least} of {of}: {name}, {ratio:.3f}" for name, ratio in ratios.items() if ratio < least]


def report_below(ratios: Mapping[str, float], least: float, of: str) -> int:
    """Print them, or that there are none: the exit code, 1 where something is below."""
    lines = below(ratios, least, of)
    print("\n".join(lines) if lines else f"never below {least} of {of} ({len(ratios)} compared)")
    return 1 if lines else 0


def against_eager(rows: Iterable[Mapping[str, Any]], ways: Iterable[str]) -> dict[str, float]:
    """For each row and each way of ours, where both were timed, how many times as fast as eager it is."""
    names = list(ways)
    return {
        f"{row['name']}, {name}": row["seconds"]["eager"] / row["seconds"][name]
        for row in rows
        for name in names
        if "eager" in row["seconds"] and name in row["seconds"]
    }
