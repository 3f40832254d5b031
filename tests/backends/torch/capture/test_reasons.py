"""Why a function cannot be traced, in words that say what to write instead and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import traced

from manyhands.errors import CannotTrace


def decides(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:  # the line that is reported
        return x * 2
    return x + 1


def counts(x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.sum())):
        x = x + 1
    return x


def inside(x: torch.Tensor) -> torch.Tensor:
    return decides(x) + 1


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.mean() > 0 else -x


def fails(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("on purpose\nsecond line")


def reason(function: Callable[..., Any]) -> str:
    with pytest.raises(CannotTrace) as refused:
        traced(function, torch.ones(3))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("function", [decides, inside])
def test_who_decides_by_a_value_hears_where_and_what_instead(function: Callable[..., Any]) -> None:
    line = decides.__code__.co_firstlineno + 1
    told = reason(function)
    assert told.startswith(
        "it needs a tensor's value in Python (in decides, line "
        f"{line} of test_reasons.py: if x.sum() > 0:  # the line that is reported)"
    )
    assert "torch.where" in told


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (counts, "range(int(x.sum()))"),
        (lambda x: x * float(x.sum()), "it needs a tensor's value in Python (in <lambda>"),
        (lambda x: torch.tensor(x.tolist()), "it needs a tensor's value in Python (in <lambda>"),
        (lambda x: torch.from_numpy(x.numpy()), "it converts a tensor to NumPy (in <lambda>"),
        (Net(), "it needs a tensor's value in Python (in forward"),
        (lambda x: x * x.sum().item(), "leave it a tensor"),
        (lambda x: x[x > 0] + 1, "torch.where(mask, x, 0) keeps the shape"),
        (fails, "ValueError: on purpose (in fails, line "),
    ],
)
def test_reasons_teach(function: Callable[..., Any], words: str) -> None:
    assert words in reason(function)
