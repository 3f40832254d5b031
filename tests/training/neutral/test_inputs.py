"""Which parts of a batch are inputs, by the arguments of a model."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.errors import BadBatch
from manyhands.training.data.roles import inputs_of


def two(a: Any, b: Any) -> None: ...


def masked(x: Any, mask: Any = None) -> None: ...


def with_mode(x: Any, train: bool = False, *, mask: Any = None) -> None: ...


def annotated(x: Any, use_running_average: bool | None = None) -> None: ...


def labelled(x: Any, labels: Any = None) -> None: ...


def endless(*inputs: Any) -> None: ...


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        (lambda x: x, {1: 1, 2: 1}),
        (two, {2: 2, 3: 2}),
        (masked, {1: 1, 3: 2}),
        (with_mode, {1: 1, 2: 1}),
        (annotated, {2: 1}),
        (labelled, {2: 1}),
        (endless, {1: 1, 2: 1, 3: 2}),
        (print, {2: 1}),
    ],
)
def test_the_last_part_is_the_target_unless_it_is_needed(call: Any, counts: dict[int, int]) -> None:
    for parts, expected in counts.items():
        assert inputs_of(call).count(parts) == expected


def test_an_optional_input_is_not_guessed() -> None:
    with pytest.raises(BadBatch, match=r"2 parts, and Net takes 1 to 2 inputs: .*targets=True\) if it is a target"):
        inputs_of(masked, "Net").count(2)
    assert inputs_of(masked, targets=True).count(2) == 1
    assert inputs_of(masked, targets=False).count(2) == 2
    with pytest.raises(BadBatch, match="3 parts, and Net takes 1 input: give"):
        inputs_of(lambda x: x, "Net").count(3)
