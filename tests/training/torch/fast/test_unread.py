"""A value that notices being read can be used like the value itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manyhands.training.torch.fast.python_state import unread


@pytest.mark.parametrize(
    "read",
    [
        lambda n: n + 1, lambda n: 1 + n, lambda n: n % 2, lambda n: 3 - n, lambda n: n == 2, lambda n: n < 5,
        lambda n: bool(n), lambda n: f"{n:03d}", lambda n: str(n), lambda n: [5, 6, 7, 8][n], lambda n: range(n),
        lambda n: torch.zeros(n), lambda n: torch.arange(8)[n], lambda n: torch.ones(4)[:n], lambda n: {2: 1}.get(n),
        lambda n: int(n), lambda n: float(n), lambda n: n.bit_length(), lambda n: torch.ones(2) * n,
    ],
)  # fmt: skip
def test_a_number_that_is_read(read: Any) -> None:
    lines: list[str] = []
    result = read(unread(2, lines.append))
    expected = read(2)
    assert torch.equal(result, expected) if isinstance(expected, torch.Tensor) else result == expected
    assert lines[0].startswith("test_unread.py:")


def test_a_number_that_is_passed_on() -> None:
    lines: list[str] = []
    number = unread(2, lines.append)
    kept = {"number": number, "list": [number]}
    assert isinstance(kept["number"], int)
    assert not lines


def test_a_text() -> None:
    lines: list[str] = []
    name = unread("images/7.png", lines.append)
    assert isinstance(name, str)
    assert not lines
    assert name.endswith(".png")
    assert "7" in name
    assert len(lines) == 2
