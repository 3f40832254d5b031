"""Splitting and gathering: the same in every framework."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.errors import BadBatch, BadDevice, BadShares, DuplicateDevices


def rows(count: int) -> list[list[float]]:
    return [[float(i), float(-i)] for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5, 7, 8])
def test_shards_are_together_the_batch(mh: Any, native: Any, count: int) -> None:
    devices = mh.try_all_gpus()
    batch = {"x": native.tensor(rows(count)), "y": native.tensor([float(i) for i in range(count)]), "name": "b"}
    shards = mh.split(batch, devices)
    assert [row for shard in shards for row in native.values(shard["x"])] == rows(count)
    sizes = [len(native.values(shard["x"])) for shard in shards]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    for shard, device in zip(shards, devices, strict=True):
        assert mh.device_of(shard) == device
        assert shard["name"] == "b"
    whole = mh.gather(shards, devices[-1])
    assert mh.device_of(whole) == devices[-1]
    assert native.values(whole["x"]) == rows(count)
    assert native.values(whole["y"]) == [float(i) for i in range(count)]


def test_shares(mh: Any, native: Any, two: list[Any]) -> None:
    x = native.tensor(rows(10))
    assert [len(native.values(s)) for s in mh.split(x, two, shares=[0.7, 0.3])] == [7, 3]
    assert [len(native.values(s)) for s in mh.split(x, two, shares=[1, 0])] == [10, 0]
    for wrong in ([-1, 2], [0, 0], [float("nan"), 1], [1], ["a", 1], [float("inf"), 1]):
        with pytest.raises(BadShares):
            mh.split(x, two, shares=wrong)


def test_the_books_split_batch(mh: Any, native: Any, two: list[Any]) -> None:
    x_shards, y_shards = mh.split_batch(native.tensor(rows(4)), native.tensor([0.0, 1.0, 2.0, 3.0]), two)
    assert [native.values(x) for x in x_shards] == [rows(4)[:2], rows(4)[2:]]
    assert [native.values(y) for y in y_shards] == [[0.0, 1.0], [2.0, 3.0]]
    assert [mh.device_of(x) for x in x_shards] == two


def test_bad_batches(mh: Any, native: Any) -> None:
    x = native.tensor(rows(2))
    for batch, text in (([x, native.tensor(1.0)], "scalar"), (["x"], "no tensor"), (x[0:0], "empty")):
        with pytest.raises(BadBatch, match=text):
            mh.split(batch, [mh.cpu()])


def test_bad_shards(mh: Any, native: Any) -> None:
    x = native.tensor(rows(2))
    for shards, text in (
        ({"x": x}, "a list of shards"),
        (x, "a list of shards"),
        ([x, native.tensor([[1.0, 2.0, 3.0]])], r"different shapes: \(2,\) in shard 0, \(3,\) in shard 1"),
        ([native.tensor(1.0), native.tensor(2.0)], "scalar"),
        ([x, "x"], "tensor in some shards"),
        ([[x], x], "structure"),
        ([{"x": x, "n": 1}, {"x": x, "n": 2}], r"shard\['n'\] is 1 in shard 0 and 2 in shard 1"),
    ):
        with pytest.raises(BadBatch, match=text):
            mh.gather(shards, mh.cpu())


def test_one_device_is_no_list_of_them(mh: Any, native: Any) -> None:
    with pytest.raises(BadDevice, match="list"):
        mh.split(native.tensor(rows(4)), mh.cpu())
    with pytest.raises(DuplicateDevices, match="more than once"):
        mh.split(native.tensor(rows(4)), [mh.cpu(), mh.cpu()])
