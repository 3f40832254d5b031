"""Whether many tensors lie where they did, read from memory at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from manyhands.backends.torch.compat import tensor_places


def replace(tensor: torch.Tensor) -> object:
    before = tensor.untyped_storage()
    tensor.data = tensor.data.clone()
    return before


def swap(tensor: torch.Tensor) -> object:
    other = nn.Parameter(torch.zeros_like(tensor)) if isinstance(tensor, nn.Parameter) else torch.zeros_like(tensor)
    torch.utils.swap_tensors(tensor, other)
    return other


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "replaced": replace,
    "another part of the same memory": lambda tensor: setattr(tensor, "data", tensor.data[1:]),
    "memory resized": lambda tensor: tensor.untyped_storage().resize_(1 << 20),
    "memory given up": lambda tensor: tensor.untyped_storage().resize_(0),
    "set_": torch.no_grad()(lambda tensor: tensor.set_(torch.ones(4))),
    "swapped": swap,
    "moved to another type": lambda tensor: setattr(tensor, "data", tensor.data.double()),
}


@pytest.fixture(params=["words", "one by one"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "one by one":
        monkeypatch.setattr(tensor_places, "_layout", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_change_is_noticed(change: Callable[[torch.Tensor], object], number: int, asked: str) -> None:
    tensors = [torch.rand(16), nn.Parameter(torch.rand(16)), torch.rand(20)[4:]]
    are_there = tensor_places.addresses_are(tensors, [tensor.data_ptr() for tensor in tensors])
    assert are_there()
    with torch.no_grad():
        tensors[2].add_(1)
        tensors[1].requires_grad_(False)
    assert are_there()  # their numbers do not matter
    held = change(tensors[number])
    assert not are_there()
    del held


def test_what_is_put_back_is_there_again(asked: str) -> None:
    parameter = nn.Parameter(torch.rand(8))
    first = parameter.data
    are_there = tensor_places.addresses_are([parameter], [parameter.data_ptr()])
    parameter.data = torch.rand(8)
    assert not are_there()
    parameter.data = first
    assert are_there()


def test_other_addresses_than_now(asked: str) -> None:
    tensors = [torch.rand(8), torch.rand(8)]
    are_there = tensor_places.addresses_are(tensors, [tensors[0].data_ptr(), tensors[0].data_ptr()])
    assert not are_there()
    tensors[1].data = tensors[0].data
    assert are_there()


def test_no_tensors_and_empty_ones(asked: str) -> None:
    assert tensor_places.addresses_are([], [])()
    empty = torch.empty(0)
    assert tensor_places.addresses_are([empty, torch.rand(3)[1:1]], [empty.data_ptr(), 0])()


def test_the_words_are_found_in_this_pytorch() -> None:
    """Where a release has another layout, this names it; programs go on with PyTorch's slower function."""
    assert tensor_places._layout.__wrapped__() is not None


@pytest.mark.parametrize("scope", [torch.inference_mode, lambda: torch.device("meta")])
def test_the_words_are_found_whatever_is_active(scope: Callable[[], object]) -> None:
    with scope():  # type: ignore[attr-defined]
        assert tensor_places._layout.__wrapped__() is not None
