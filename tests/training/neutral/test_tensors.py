"""Tensors as bytes: what comes back is what went in, and tensors of something else are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from manyhands.errors import CheckpointDamaged, WrongCheckpoint
from manyhands.training.checkpoints import tensors


def test_there_and_back() -> None:
    given = {"a.weight": np.arange(6.0).reshape(2, 3).T, "count": np.int32(7), "none": np.zeros((0, 2), np.float32)}
    found = tensors.unpack(tensors.pack(given))
    assert {name: (one.dtype, one.tolist()) for name, one in found.items()} == {
        name: (np.asarray(one).dtype, np.asarray(one).tolist()) for name, one in given.items()
    }
    assert tensors.unpack(tensors.pack({})) == {}


def test_kinds_that_numpy_does_not_know_are_widened() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    own = {"w": np.array([1.5, -0.1], ml_dtypes.bfloat16)}
    found = tensors.arrays_for(tensors.pack(own), own, "weights of another model")
    assert found["w"].dtype == ml_dtypes.bfloat16
    assert found["w"].tolist() == own["w"].tolist()


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"w": np.zeros(3)}, "w is (3,), here it is (2,)"),
        ({"w": np.zeros(2), "v": np.zeros(1)}, "v is unknown here"),
        ({}, "w is missing"),
    ],
)
def test_tensors_of_something_else(saved: dict[str, object], said: str) -> None:
    with pytest.raises(WrongCheckpoint, match="these are weights of another model: ") as caught:
        tensors.arrays_for(tensors.pack(saved), {"w": np.zeros(2)}, "weights of another model")
    assert said in str(caught.value)


def test_bytes_that_are_no_tensors() -> None:
    with pytest.raises(CheckpointDamaged):
        tensors.unpack(b"nothing of the kind")
