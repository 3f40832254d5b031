"""Moving, copying and checking: the same in every framework."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from manyhands.errors import DeviceMismatch, ForeignTensor, NotATensor, SeveralDevices

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Sample:
    image: Any
    label: Any
    name: str = "a"
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made.append("made")


def test_a_move_that_is_already_done_is_free(mh: Any, native: Any) -> None:
    for device in [mh.cpu(), *mh.try_all_gpus()]:
        x = mh.to(native.tensor([1.0, 2.0]), device)
        assert mh.to(x, device) is x
        assert mh.device_of(x) == device
        tree = {"x": x, "more": [x, "name", 3, None]}
        assert mh.to(tree, device) is tree


def test_copy_always_makes_new_memory(mh: Any, native: Any) -> None:
    for device in [mh.cpu(), *mh.try_all_gpus()]:
        x = mh.to(native.tensor([[1.0, 2.0], [3.0, 4.0]]), device)
        for y in (mh.copy(x, device), mh.copy(x)):
            assert y is not x
            assert mh.device_of(y) == device
            assert native.values(y) == [[1.0, 2.0], [3.0, 4.0]]
            assert native.address(y) != native.address(x)


def test_a_move_carries_the_values(mh: Any, native: Any, two: list[Any]) -> None:
    x = native.tensor([[1.0, 2.0], [3.0, 4.0]])
    for device in (*two, mh.cpu(), two[1]):
        x = mh.to(x, device)
        assert mh.device_of(x) == device
        assert native.values(x) == [[1.0, 2.0], [3.0, 4.0]]


def test_trees_keep_their_structure(mh: Any, native: Any, two: list[Any]) -> None:
    x, y = native.tensor([1.0]), native.tensor([2.0])
    sample = Sample(image=x, label=y)
    tree = {"z": [x, (y, Pair(x, y))], "a": OrderedDict(b=y), "sample": sample, "text": "hello", "n": 3, "none": None}
    moved = mh.to(tree, two[1])
    assert list(moved) == list(tree)
    assert type(moved["z"][1][1]) is Pair
    assert type(moved["a"]) is OrderedDict
    assert (moved["text"], moved["n"], moved["none"]) == ("hello", 3, None)
    assert isinstance(moved["sample"], Sample)
    assert moved["sample"].made == ["made"]  # __post_init__ did not run again
    assert mh.device_of(moved) == two[1]
    assert moved["z"][0] is moved["sample"].image  # one tensor stays one tensor
    assert mh.device_of(x) == mh.cpu()  # the source is untouched
    assert sample.image is x


def test_an_asynchronous_move_is_read_through_its_result(mh: Any, native: Any) -> None:
    for device in [mh.cpu(), *mh.try_all_gpus()]:
        x = {"x": native.tensor([[1.0, 2.0]]), "n": 1}
        arrival = mh.to(x, device, wait=False)
        moved = arrival.result()
        assert arrival.ready()
        assert arrival.result() is moved
        assert mh.device_of(moved) == device
        assert native.values(moved["x"]) == [[1.0, 2.0]]
        back = mh.to(moved, mh.cpu(), wait=False).result()
        assert mh.device_of(back) == mh.cpu()
        assert native.values(back["x"]) == [[1.0, 2.0]]
        assert mh.to(back, mh.cpu(), wait=False).result() is back


def test_a_move_under_way_is_not_its_value(mh: Any, native: Any) -> None:
    arrival = mh.to(native.tensor([1.0]), mh.cpu(), wait=False)
    for call in (lambda x: mh.to(x, mh.cpu()), mh.copy, mh.check_same_device, lambda x: mh.split(x, [mh.cpu()])):
        with pytest.raises(NotATensor, match=r"pass its result\(\)"):
            call([native.tensor([1.0]), arrival])


def test_all_of_many_tensors_are_looked_at(mh: Any, native: Any, two: list[Any]) -> None:
    for elsewhere in (0, 50, 99):
        many = [mh.to(native.tensor([float(i)]), two[0]) for i in range(100)]
        assert mh.to(many, two[0]) is many
        many[elsewhere] = mh.to(many[elsewhere], two[1])
        assert not native.backend.all_on(many, two[0])
        assert mh.device_of(mh.to(many, two[0])) == two[0]
    assert not native.backend.all_on([mh.to(native.tensor([1.0]), two[0]), "text"], two[0])


def test_a_mismatch_names_every_culprit_and_the_cure(mh: Any, native: Any, two: list[Any]) -> None:
    a = mh.to(native.tensor([1.0]), two[1])
    b = mh.to(native.tensor([2.0]), two[1])
    c = mh.to(native.tensor([2.0]), two[0])
    assert mh.check_same_device(a, [b], named={"x": b}) == two[1]
    assert mh.check_same_device() is None
    assert mh.check_same_device(1, "x") is None
    with pytest.raises(DeviceMismatch) as caught:
        mh.check_same_device(a, b, batch={"labels": [c]})
    text = str(caught.value)
    assert "batch['labels'][0]: virtual:0" in text or "batch['labels'][0]: gpu:0" in text
    assert "argument 0: " in text
    assert 'batch = mh.to(batch, "gpu:1")' in text


def test_devices_of_models(mh: Any, native: Any) -> None:
    net = native.model()
    assert mh.device_of(net) == mh.cpu()
    assert mh.check_same_device(net=net, x=native.tensor([1.0])) == mh.cpu()


def test_a_mismatch_names_the_parameter(mh: Any, native: Any, two: list[Any]) -> None:
    net, x = native.model(), mh.to(native.tensor([1.0]), two[1])
    path = next(iter(native.backend.model_tensors(net)))[0]
    with pytest.raises(DeviceMismatch) as caught:
        mh.check_same_device(net=net, x=x)
    assert f"net.{path}: " in str(caught.value)
    assert "x: " in str(caught.value)


def test_a_model_is_moved_with_all_its_tensors(mh: Any, native: Any, two: list[Any]) -> None:
    if not native.backend.CAPABILITIES.moves_models:
        with pytest.raises(NotATensor, match="with"):
            mh.to(native.model(), two[1])
        return
    net = mh.to(native.model(), two[1])
    assert mh.device_of(net) == two[1]
    assert mh.to(net, two[1]) is net


def test_several_devices_are_not_one(mh: Any, native: Any, two: list[Any]) -> None:
    x = native.tensor([1.0])
    with pytest.raises(SeveralDevices, match=r"x\[1\]"):
        mh.device_of([mh.to(x, two[0]), mh.to(x, two[1])])


def test_what_is_no_tensor_has_no_device(mh: Any) -> None:
    with pytest.raises(NotATensor):
        mh.device_of([])
    assert mh.to("hello", mh.cpu()) == "hello"


def test_a_tensor_of_another_framework_is_refused(mh: Any, native: Any) -> None:
    foreign = np.ones(3)
    for call in (mh.device_of, mh.copy, mh.check_same_device, lambda x: mh.to(x, mh.cpu())):
        with pytest.raises(ForeignTensor, match=r"numpy\.ndarray"):
            call(foreign)
    with pytest.raises(ForeignTensor):
        mh.split([native.tensor([1.0]), foreign], [mh.cpu()])
    names = np.array(["a", "b"])
    assert mh.to([names], mh.cpu())[0] is names


def test_a_tree_that_contains_itself_is_refused(mh: Any, native: Any) -> None:
    tree: list[Any] = [native.tensor([1.0])]
    tree.append(tree)
    with pytest.raises(ValueError, match="contains itself"):
        mh.to(tree, mh.cpu())


def test_synchronize_takes_a_device_or_none(mh: Any) -> None:
    mh.synchronize()
    mh.synchronize(mh.cpu())
    mh.synchronize(mh.try_gpu())
    mh.synchronize("cpu")
    mh.waitall()
