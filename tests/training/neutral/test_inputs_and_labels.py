"""Labels and data that no framework could train with, as they are told to the user."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from manyhands.errors import BadBatch, BadLabels
from manyhands.training.data.labels import ClassLabels
from manyhands.training.data.order import Cursor
from manyhands.training.data.roles import inputs_of
from manyhands.training.data.sources import Stream, source

X = np.zeros((4, 2), dtype=np.float32)
Y = np.array([0, 1, 2, 1])


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (Y + 1, "from 1 to 3, but the model has 3 outputs: they must be 0 to 2. If they begin at 1, subtract 1"),
        (Y - 1, "from -1"),
        (Y.astype(np.float32), r"float32, and class numbers are whole, 0 to 2: give y\.astype\('int32'\)"),
        (Y > 0, "are bool"),
        (Y[:, None], r"shape \(4, 1\).*give y\.reshape\(-1\)"),
        (np.eye(3)[Y], r"one-hot, give y\.argmax\(1\)"),
        (np.eye(3, dtype=int)[Y], r"one-hot, give y\.argmax\(1\)"),
        (np.zeros((4, 5), dtype=int), r"shape \(4, 5\).*another loss="),
    ],
)
def test_labels_that_are_no_classes_of_the_model(labels: Any, said: str) -> None:
    with pytest.raises(BadLabels, match=said):
        ClassLabels(3).look(labels)


def test_labels_that_are() -> None:
    for labels in (Y, Y.astype(np.uint8), Y[:0], Y.astype(np.int32)):
        ClassLabels(3).look(labels)
    ClassLabels(3, ignored=-1).look(np.array([-1, -1, 2, 0]))
    ClassLabels(3, floats=True).look(np.array([0.0, 2.0, np.nan, 1.0]))
    ClassLabels(3, columns=True).look(Y[:, None])


def test_data_that_are_no_numbers() -> None:
    with pytest.raises(BadBatch, match=r"hold text where numbers are needed.*np\.unique"):
        source((X, Y.astype(str)))
    with pytest.raises(BadBatch, match="hold object"):
        list(Stream([(X, np.array([None] * 4))]).windows(Cursor(), 0))


def test_labels_wait_until_the_number_of_outputs_is_known() -> None:
    labels = ClassLabels()
    labels.look(Y)
    labels.look(Y + 2)
    with pytest.raises(BadLabels, match="from 2 to 4, but the model has 3 outputs"):
        labels.learn((8, 3))
    with pytest.raises(BadLabels, match="from 2 to 4"):  # a step that is made again finds it again
        labels.learn((8, 3))
    later = ClassLabels()
    later.look(Y)
    later.learn((8, 3))
    with pytest.raises(BadLabels, match="from 1 to 3"):
        later.look(Y + 1)
    images = ClassLabels()
    images.look(Y - 9)
    images.learn((8, 3, 5, 5))  # no class scores: the loss says what it does not take
    images.look(Y - 9)


# Which parts of a batch are inputs, by the arguments of a model


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
