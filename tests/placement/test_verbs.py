"""The verbs on the fake backend: properties, counts of what is done, and faults."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import hypothesis.strategies as st
import pytest
from fake_backend import FakeBackend, FakeDevice, FakeModel, FakeTensor, Faults
from hypothesis import given

from manyhands import tree
from manyhands.device import Device, DeviceRecord
from manyhands.errors import (
    DeviceError,
    DeviceMismatch,
    NoSuchDevice,
    NotATensor,
    PlacementFailed,
    SeveralDevices,
    VirtualDevicesError,
)
from manyhands.placement.verbs import Verbs

GPU0, GPU1 = FakeDevice("gpu", 0), FakeDevice("gpu", 1)


def fake(gpus: int = 2, faults: Faults | None = None) -> tuple[Verbs[FakeTensor, FakeDevice, FakeModel], FakeBackend]:
    backend = FakeBackend(gpus, faults)
    return Verbs(backend), backend


tensors = st.builds(
    FakeTensor, st.lists(st.integers(), min_size=1, max_size=4), st.sampled_from([FakeDevice("cpu"), GPU0, GPU1])
)
trees = st.recursive(
    tensors | st.text(max_size=2) | st.integers(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=2), children, max_size=4),
    max_leaves=12,
)


def _tensors(value: Any) -> list[FakeTensor]:
    return [leaf for leaf in tree.flatten(value)[0] if isinstance(leaf, FakeTensor)]


@given(trees)
def test_to_moves_what_is_elsewhere_and_nothing_else(value: Any) -> None:
    mh, backend = fake()
    moved = mh.to(value, GPU1)
    assert [t.data for t in _tensors(moved)] == [t.data for t in _tensors(value)]
    assert {t.device for t in _tensors(moved)} <= {GPU1}
    elsewhere = {id(t) for t in _tensors(value) if t.device != GPU1}
    assert backend.calls == ["move"] * len(elsewhere)
    assert mh.to(moved, GPU1) is moved
    assert mh.to(value, GPU1, wait=False).result() is not None


def test_one_tensor_stays_one_tensor() -> None:
    mh, backend = fake()
    x = FakeTensor([1])
    for one, other in (
        mh.to([x, x], GPU1),
        mh.to([x, x], GPU1, wait=False).result(),
        mh.copy([x, x]),
    ):
        assert one is other
        assert one.data is not x.data
    assert backend.calls == ["move", "start_move", "synchronize", "copy"]


def test_a_copy_in_a_wrong_place_is_seen() -> None:
    mh, _ = fake(faults=Faults(joins_on_host=True))
    shards = mh.split(FakeTensor([1, 2]), [GPU0, GPU1])
    with pytest.raises(PlacementFailed):
        mh.gather(shards, GPU1)


def test_synchronize_waits_for_the_device_that_is_named() -> None:
    mh, backend = fake()
    mh.synchronize("gpu:1")
    mh.synchronize(GPU0)
    mh.synchronize()
    assert backend.waited_for == [GPU1, GPU0, None]
    with pytest.raises(NoSuchDevice):
        mh.synchronize("gpu:99")


def test_a_model_is_refused_where_a_tensor_is_meant() -> None:
    mh, _ = fake()
    net = FakeModel(weight=FakeTensor([1, 2]))
    for call, cure in (
        (lambda: mh.copy(net), "deepcopy"),
        (lambda: mh.to([net], GPU0, wait=False), "without wait=False"),
        (lambda: mh.split([FakeTensor([1]), net], [GPU0]), "a batch holds samples"),
        (lambda: mh.gather([net, net], GPU0), "shards hold samples"),
    ):
        with pytest.raises(NotATensor, match=cure):
            call()


def test_memory_that_nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    mh, backend = fake()
    assert mh.memory(GPU0).total == 1000
    silent = DeviceRecord(Device("gpu", 0), "Silent", None, None, None)
    monkeypatch.setattr(backend, "describe", lambda device: silent)
    with pytest.raises(DeviceError, match=r"memory of gpu:0.*manyhands\[gpu\]"):
        mh.memory(GPU0)


def test_a_tensor_over_several_devices_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mh, backend = fake()

    def spread(tensor: FakeTensor) -> FakeDevice:
        raise SeveralDevices("it is spread over gpu:0, gpu:1")

    monkeypatch.setattr(backend, "device_of", spread)
    with pytest.raises(SeveralDevices, match=r"batch\['x'\]: it is spread"):
        mh.check_same_device(batch={"x": FakeTensor([1])})
    with pytest.raises(SeveralDevices, match=r"net\.weight: it is spread"):
        mh.check_same_device(net=FakeModel(weight=FakeTensor([1])))


def test_the_cure_of_a_tie_moves_what_is_on_the_cpu() -> None:
    mh, _ = fake()
    net, batch = FakeModel(weight=FakeTensor([1])), FakeTensor([1], GPU1)
    for arguments in ({"net": net, "batch": batch}, {"batch": batch, "net": net}):
        with pytest.raises(DeviceMismatch, match=r'net = mh\.to\(net, "gpu:1"\)'):
            mh.check_same_device(**arguments)


@given(st.lists(st.integers(), min_size=1, max_size=30), st.integers(1, 6), st.data())
def test_gather_is_the_inverse_of_split(rows: list[int], count: int, data: Any) -> None:
    mh, _ = fake(gpus=count)
    devices = mh.try_all_gpus()
    parts = data.draw(
        st.none() | st.lists(st.integers(0, 9), min_size=count, max_size=count).filter(lambda s: sum(s) > 0)
    )
    batch = {"x": FakeTensor(rows), "y": [FakeTensor([-r for r in rows]), "name"]}
    shards = mh.split(batch, devices, parts)
    assert [shard["x"].device for shard in shards] == devices
    assert [row for shard in shards for row in shard["x"].data] == rows
    whole = mh.gather(shards, devices[-1])
    assert whole["x"].data == rows
    assert whole["y"][0].data == [-r for r in rows]
    assert whole["y"][1] == "name"
    assert mh.device_of(whole) == devices[-1]


def test_a_tensor_that_lands_elsewhere_is_an_error() -> None:
    mh, _ = fake(faults=Faults(lands_on_host={GPU1}))
    x = FakeTensor([1])
    assert mh.to(x, GPU0).device == GPU0
    for place in (lambda: mh.to(x, GPU1), lambda: mh.copy(x, GPU1), lambda: mh.to(x, GPU1, wait=False).result()):
        with pytest.raises(PlacementFailed, match="gpu:1 and put it on cpu"):
            place()
    with pytest.raises(PlacementFailed):
        mh.to(FakeModel(weight=x), GPU1)


def test_an_error_of_asynchronous_work_surfaces_at_the_wait() -> None:
    mh, backend = fake(faults=Faults(slow=True))
    arrival = mh.to(FakeTensor([1]), GPU0, wait=False)
    assert not arrival.ready()
    assert "under way" in repr(arrival)
    backend.faults.pending_error = RuntimeError("the copy failed")
    with pytest.raises(RuntimeError, match="the copy failed"):
        arrival.result()
    assert arrival.result().device == GPU0
    backend.faults.pending_error = RuntimeError("later")
    with pytest.raises(RuntimeError, match="later"):
        mh.waitall()


def test_a_device_that_vanishes() -> None:
    mh, backend = fake(gpus=2)
    x = mh.to(FakeTensor([1]), GPU1)
    backend.gpus = 1
    with pytest.raises(NoSuchDevice, match=r"there is no gpu:1: fake sees cpu, gpu:0"):
        mh.to(FakeTensor([1]), GPU1)
    assert mh.to(x, "cpu").data == [1]


def test_virtual_devices_stand_in_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    mh, _ = fake(gpus=0)
    made = mh.virtual_devices(2)
    assert made == mh.try_all_gpus() == [FakeDevice("virtual", 0), FakeDevice("virtual", 1)]
    assert mh.virtual_devices(2) == made
    assert capsys.readouterr().err.count("2 virtual CPU devices") == 1
    assert mh.to(FakeTensor([1]), "gpu:1").device == mh.gpu(1)
    assert [str(record.device) for record in mh.devices()] == ["cpu", "virtual:0", "virtual:1"]
    with pytest.raises(VirtualDevicesError):
        mh.virtual_devices(3)


@pytest.mark.parametrize("text", ["x", "-1", "1.5"])
def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MANYHANDS_VIRTUAL_DEVICES", text)
    with pytest.raises(VirtualDevicesError, match="number of devices"):
        fake()


def test_a_long_mismatch_can_be_read() -> None:
    mh, _ = fake()
    net = FakeModel(**{f"layer{i}": FakeTensor([i], GPU0) for i in range(100)})
    with pytest.raises(DeviceMismatch) as caught:
        mh.check_same_device(net=net, x=FakeTensor([1]))
    text = str(caught.value)
    assert "... and 92 more on gpu:0" in text
    assert 'Write x = mh.to(x, "gpu:0")' in text


class Encoded(UserDict[str, Any]):
    """As the batches of tokenizers: a mapping that is no dict, with more than its entries."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings


def test_a_mapping_that_is_no_dict_is_moved_divided_and_put_together() -> None:
    mh, _ = fake()
    batch = Encoded({"ids": FakeTensor([1, 2, 3, 4], FakeDevice("cpu")), "name": "text"}, "kept")
    moved = mh.to(batch, GPU1)
    assert type(moved) is Encoded
    assert moved["ids"].device == GPU1
    assert (moved["name"], moved.encodings) == ("text", "kept")
    assert batch["ids"].device == FakeDevice("cpu")
    shards = mh.split(Encoded({"ids": batch["ids"]}, "kept"), [GPU0, GPU1])
    assert [shard["ids"].device for shard in shards] == [GPU0, GPU1]
    assert type(mh.gather(shards, FakeDevice("cpu"))) is Encoded
