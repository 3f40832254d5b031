"""What is PyTorch's own: gradients, models, and moves of its kinds of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import run_python
from torch.nn.utils.rnn import pack_sequence

from manyhands import Device
from manyhands import torch as mh
from manyhands.backends.torch import devices as backend
from manyhands.backends.torch import virtual
from manyhands.errors import BadDevice, ChangedInFlight, NoSuchDevice, NotATensor


def test_moving_keeps_gradients_and_leaves() -> None:
    x = torch.ones(3, requires_grad=True)
    assert mh.to(x, mh.cpu()) is x
    mh.copy(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


@pytest.mark.parametrize("kind", ["meta", "mps", "xpu"])
def test_other_kinds_of_devices_are_refused(kind: str) -> None:
    with pytest.raises(BadDevice, match=f"'{kind}.*neither the CPU nor a GPU"):
        mh.to(torch.ones(2), torch.device(kind))
    if kind == "meta":
        with pytest.raises(BadDevice):
            mh.check_same_device(torch.ones(2), torch.ones(2, device="meta"))


@pytest.mark.skipif(bool(virtual.count()), reason="with virtual devices cpu:0 is the first of them")
def test_the_numbered_cpu_is_the_host() -> None:
    x, numbered = torch.ones(2), torch.device("cpu:0")
    assert mh.to(x, numbered) is x
    assert mh.to([x], numbered)[0] is x
    assert mh.copy(x, numbered).device == mh.cpu()
    assert mh.to(x, numbered, wait=False).result() is x
    assert backend.neutral(numbered) == Device("cpu")
    with pytest.raises(NoSuchDevice, match="virtual:1"):
        mh.to(x, torch.device("cpu:1"))


def test_a_packed_sequence_is_moved_by_its_own_rules() -> None:
    device = mh.try_all_gpus()[-1]
    packed = pack_sequence([torch.ones(3, 1), torch.ones(5, 1)], enforce_sorted=False)
    tree: dict[str, Any] = mh.to({"x": packed, "y": torch.ones(2)}, device)
    moved = tree["x"]
    assert type(moved) is type(packed)
    assert mh.device_of(moved) == moved.data.device == moved.unsorted_indices.device == device
    assert moved.batch_sizes.device == mh.cpu()  # PyTorch wants it there
    assert mh.to(tree, device) is tree
    assert mh.check_same_device(tree) == device
    lstm = mh.to(torch.nn.LSTM(1, 2), device)
    assert lstm(moved)[0].data.device == device
    for call in (
        lambda: mh.copy(packed),
        lambda: mh.to([packed], device, wait=False),
        lambda: mh.split(packed, [device]),
    ):
        with pytest.raises(NotATensor, match="PackedSequence"):
            call()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_every_layout_takes_an_asynchronous_move() -> None:
    device = mh.cpu()
    with torch.inference_mode():
        born_in_inference = torch.ones(3)
    sparse = torch.eye(3).to_sparse()
    for x in (sparse, sparse.to_sparse_csr(), born_in_inference):
        assert backend.start_move(x, device).result().layout == x.layout
        assert backend.start_move(x, device, source_is_final=True).result().layout == x.layout


def test_writes_are_counted_where_pytorch_counts_them() -> None:
    x = torch.ones(3)
    before = backend._version(x)
    backend._check_unchanged(x, before)
    x.add_(1)
    with pytest.raises(ChangedInFlight, match="before result"):
        backend._check_unchanged(x, before)
    with torch.inference_mode():
        y = torch.ones(3)
        assert backend._version(y) is None
        y.add_(1)
        backend._check_unchanged(y, None)


def test_a_model_without_tensors_is_left_as_it_is() -> None:
    net = torch.nn.ReLU()
    assert mh.to(net, mh.try_gpu()) is net


def test_importing_the_door_imports_only_torch_and_starts_nothing() -> None:
    """Neither another framework nor the compiler, which finds our backend when it is asked for."""
    names = "'jax', 'tensorflow', 'mxnet', 'torch._dynamo.backends.registry'"
    code = (
        "import sys; from manyhands import torch as mh; import torch;"
        f"print(sorted({{{names}}} & set(sys.modules)), torch.cuda.is_initialized())"
    )
    assert run_python(code, MANYHANDS_VIRTUAL_DEVICES="").stdout == "[] False\n"
