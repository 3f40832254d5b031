"""Devices, shares and trees: the words that stand on nothing else."""

from __future__ import annotations

import doctest
import threading
from collections import namedtuple
from dataclasses import dataclass, make_dataclass
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from manyhands import Device, amounts, shares, tree
from manyhands.device import check_distinct
from manyhands.errors import BadDevice, BadShares, DuplicateDevices


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", Device("cpu")),
        ("gpu", Device("gpu", 0)),
        ("GPU:1", Device("gpu", 1)),
        (" cuda:2 ", Device("gpu", 2)),
        ("virtual:3", Device("virtual", 3)),
        ("cpu(0)", Device("cpu")),  # MXNet's
        ("gpu(1)", Device("gpu", 1)),
        ("/GPU:1", Device("gpu", 1)),  # TensorFlow's
        ("/device:CPU:0", Device("cpu")),
        ("/job:localhost/replica:0/task:0/device:GPU:1", Device("gpu", 1)),
    ],
)
def test_names_are_read(text: str, device: Device) -> None:
    assert Device.parse(text) == device
    assert Device.parse(str(device)) == device


@pytest.mark.parametrize(
    "text", ["", "gpu:", "gpu:x", "gpu:-1", "gpu 1", "tpu", "gpu:1.0", "gpu:1\n2", "gpu(1", "gpu:1)", "/device:"]
)
def test_rubbish_is_refused(text: str) -> None:
    with pytest.raises(BadDevice, match="'cpu', 'gpu'"):
        Device.parse(text)


@pytest.mark.parametrize("index", [-1, 1.0, "1", None, True])
def test_an_index_is_a_number(index: Any) -> None:
    with pytest.raises(BadDevice):
        Device("gpu", index)


def test_lists_of_devices() -> None:
    check_distinct(["gpu:0", "gpu:1"])
    with pytest.raises(DuplicateDevices, match="gpu:0 appears more than once"):
        check_distinct(["gpu:0", "gpu:1", "gpu:0"])
    with pytest.raises(BadDevice):
        check_distinct([])


@pytest.mark.parametrize("module", [amounts, shares])
def test_the_examples_hold(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted
    assert results.failed == 0


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_even_sizes_are_even_and_complete(total: int, count: int) -> None:
    sizes = shares.sizes(total, count)
    assert sum(sizes) == total
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


amounts_of = st.lists(st.integers(0, 10**6), min_size=1, max_size=20).filter(any)
parts_of_one = amounts_of.map(lambda amounts: [amount / sum(amounts) for amount in amounts])


@given(st.integers(0, 10_000), amounts_of | parts_of_one)
def test_sizes_follow_the_shares(total: int, parts: list[float]) -> None:
    sizes = shares.sizes(total, len(parts), parts)
    assert sum(sizes) == total
    whole = sum(map(float, parts))
    for size, part in zip(sizes, parts, strict=True):
        assert abs(size - total * part / whole) < 1 + 1e-6 * total
        assert part > 0 or size == 0


def test_numbers_of_numpy_are_shares() -> None:
    np = pytest.importorskip("numpy")
    for kind in (np.float32, np.float64, np.int8, np.int64):
        assert shares.sizes(10, 2, [kind(3), kind(1)]) == [8, 2]
    assert shares.sizes(10, 2, np.array([0.7, 0.3])) == [7, 3]
    largest = np.int64(2**62)
    assert shares.sizes(9, 3, [largest, largest, largest]) == [3, 3, 3]  # no overflow in NumPy's own arithmetic
    assert shares.sizes(3, 2, [Fraction(1, 3), Fraction(2, 3)]) == [1, 2]
    with pytest.raises(BadShares):
        shares.sizes(10, 2, [np.bool_(True), 1])


@pytest.mark.parametrize(
    "wrong",
    [[-1, 2], [0, 0], [float("nan"), 1], [1], [1, 2, 3], ["a", 1], [True, 1], [10**400, 1], 0.5, [1j, 1], [None, 1]],
)
def test_what_is_no_share_is_refused(wrong: Any) -> None:
    with pytest.raises(BadShares):
        shares.sizes(10, 2, wrong)


def test_shares_are_parts_of_one_or_whole_numbers() -> None:
    assert shares.check([0.33, 0.33, 0.33]) == shares.check([7, 7, 7.0]) == [Fraction(1, 3)] * 3
    with pytest.raises(BadShares, match=r"\[0.5, 0.9\] add up to 1.4: give parts of one, as \[0.36, 0.64\], or whole"):
        shares.check([0.5, 0.9])
    with pytest.raises(BadShares, match=r"add up to 0.9"):
        shares.check([0.3, 0.3, 0.3])


@dataclass
class Inner:
    value: int
    note: str = "n"


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    items: list[Any]


def test_dataclasses_are_branches() -> None:
    outer = Outer(Inner(1), [2, Inner(3)])
    leaves, structure = tree.flatten({"a": outer})
    assert leaves == [1, "n", 2, 3, "n"]
    assert tree.paths(structure, "x")[0] == "x['a'].inner.value"
    assert tree.map_leaves(lambda leaf: leaf, {"a": outer}) == {"a": outer}
    doubled = tree.map_leaves(lambda leaf: leaf * 2, outer)
    assert doubled == Outer(Inner(2, "nn"), [4, Inner(6, "nn")])
    assert outer.inner.value == 1


def test_a_dataclass_seen_first_by_several_threads_is_a_branch_in_all_of_them() -> None:
    for _ in range(50):
        cls = make_dataclass("Fresh", ["value", "more"])
        start = threading.Barrier(4)
        found: list[list[Any]] = []

        def look(cls: Any = cls, start: Any = start, found: Any = found) -> None:
            start.wait()
            found.append(tree.flatten([cls(1, 2)])[0])

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[1, 2]] * 4


def test_a_dataclass_that_another_thread_registers_meanwhile_is_a_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst moment: taken apart as a leaf, and a branch before this thread asks."""
    cls = make_dataclass("Raced", ["value"])
    ask = tree._new_branches

    def late(types: set[type]) -> bool:
        if cls in types:
            monkeypatch.setattr(tree, "_new_branches", ask)
            tree.flatten(cls(0))
        return ask(types)

    monkeypatch.setattr(tree, "_new_branches", late)
    assert tree.flatten([cls(7)])[0] == [7]


def test_what_is_kept_whole_is_a_leaf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_whole", set())
    pair, record = namedtuple("Pair", "a b")(1, 2), make_dataclass("Record", ["a"])(1)
    assert tree.flatten([pair, record])[0] == [1, 2, 1]
    other = make_dataclass("Other", ["a"])(1)
    for whole in (pair, other):
        tree.keep_whole(type(whole))
    assert tree.flatten([pair, other, record])[0] == [pair, other, 1]
    # Also where a framework says what else is a leaf.
    assert tree.flatten([pair, other, record], lambda value: value is record)[0] == [pair, other, record]


def test_a_field_that_is_not_set_yet_is_left_out() -> None:
    inner = Inner(1)
    del inner.value
    assert tree.flatten(inner)[0] == ["n"]


values = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.text(max_size=3), children, max_size=4)
        | st.tuples(children, children)
        | st.builds(Inner, children, st.text(max_size=2))
    ),
    max_leaves=20,
)


@given(values)
def test_taking_apart_and_putting_together_is_nothing(value: Any) -> None:
    leaves, structure = tree.flatten(value)
    assert structure.unflatten(leaves) == value
    assert len(tree.paths(structure)) == len(leaves)
