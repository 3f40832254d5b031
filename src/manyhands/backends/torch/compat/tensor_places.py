"""Checks whether many tensors are still at their addresses, before every replay of a plan.

PyTorch has a function for it, which Inductor calls before it replays a CUDA graph. It converts lists to vectors at
each call, and a net of 150 convolutions has 500 tensors. So the words that hold the address of a tensor are read from
memory:

    Python object  ->  TensorImpl  ->  StorageImpl  ->  data
                       storage_offset

``p.data = ...`` changes the second arrow, ``swap_tensors`` the first, resizing the last. An arrow is followed only if
all arrows before it are as they were: then the object that it leads to is alive.

The position of a word in its object differs between releases. So it is found with a few tensors, and tested: each of
these changes must be noticed. If that fails, PyTorch's function is called.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

from manyhands.backends.torch.compat.memory_words import reader

_WORD = 8
_IMPL_WORDS = 24  # a TensorImpl has 192 bytes, which PyTorch asserts when it is built
_STORAGE_WORDS = 8  # a StorageImpl has more
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other classes may compute their address

# PyTorch's function. None in a build without CUDA.
equal_addresses: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def addresses_are(tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Callable[[], bool]:
    """A check that tensors are at these addresses."""
    tensors, addresses = list(tensors), list(addresses)
    slowly = _asked_one_by_one(tensors, addresses)
    layout = _layout()
    if layout is None or not tensors or not all(type(tensor) in _PLAIN for tensor in tensors) or not slowly():
        return slowly
    return _Words(tensors, layout).are_unchanged


def _asked_one_by_one(tensors: list[torch.Tensor], addresses: list[int]) -> Callable[[], bool]:
    if equal_addresses is None:
        return lambda: list(map(torch.Tensor.data_ptr, tensors)) == addresses
    return functools.partial(equal_addresses, tensors, addresses, [*range(len(tensors))])


class _Layout(NamedTuple):
    """The offset of each word in its object, in bytes."""

    impl: int  # in the Python object
    storage: int  # in the TensorImpl
    offset: int  # in the TensorImpl, in elements
    data: int  # in the StorageImpl


class _Words:
    """The words that hold the addresses of tensors, as they were at first."""

    def __init__(self, tensors: Sequence[torch.Tensor], layout: _Layout) -> None:
        self._tensors = tensors  # keeps the Python objects alive, and they keep what they point to
        impls = [tensor._cdata for tensor in tensors]
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        self._impls = reader([id(tensor) + layout.impl for tensor in tensors])
        self._fields = reader([impl + at for impl in impls for at in (layout.storage, layout.offset)])
        self._data = reader([storage + layout.data for storage in storages])
        self._known = self._impls(), self._fields(), self._data()

    def are_unchanged(self) -> bool:
        impls, fields, data = self._known
        return self._impls() == impls and self._fields() == fields and self._data() == data


@functools.cache
def _layout() -> _Layout | None:
    """The layout; None if the words cannot be found, or do not show every change."""
    with torch.inference_mode(False), no_dispatch_modes():  # modes would change the tensors that are made here
        try:
            layout = _found_layout()
            is_reliable = layout is not None and all(_is_noticed(change, layout) for change in _CHANGES)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
    return layout if is_reliable else None


def _found_layout() -> _Layout | None:
    probes = _probes()
    storages = [tensor.untyped_storage() for tensor in probes]
    impls = [tensor._cdata for tensor in probes]
    storage_impls = [storage._cdata for storage in storages]
    impl = _place_of(impls, [id(tensor) for tensor in probes], torch.Tensor.__basicsize__ // _WORD)
    storage = _place_of(storage_impls, impls, _IMPL_WORDS)
    offset = _place_of([int(tensor.storage_offset()) for tensor in probes], impls, _IMPL_WORDS)
    data = _place_of([storage.data_ptr() for storage in storages], storage_impls, _STORAGE_WORDS)
    if impl is None or storage is None or offset is None or data is None:
        return None
    return _Layout(impl, storage, offset, data)


def _probes() -> list[torch.Tensor]:
    """Tensors with odd offsets, and one in the memory of another object: there data and allocation differ."""
    borrowed = torch.frombuffer(bytearray(2000), dtype=torch.uint8)
    return [torch.empty(20000, device="cpu")[12345:], torch.empty(30000, device="cpu")[23457:23460], borrowed[1234:]]


def _place_of(words: Sequence[int], objects: Sequence[int], count: int) -> int | None:
    """The offset at which all of these objects have their word; None if there is not exactly one."""
    places = [
        number * _WORD
        for number in range(count)
        if all(
            ctypes.c_uint64.from_address(start + number * _WORD).value == word
            for start, word in zip(objects, words, strict=True)
        )
    ]
    return places[0] if len(places) == 1 else None


def _is_noticed(change: Callable[[torch.Tensor], object], layout: _Layout) -> bool:
    tensor = _eight_zeros()
    words = _Words([tensor], layout)
    before = words.are_unchanged()
    held = change(tensor)  # keeps what it returns alive, so that its memory is not reused
    noticed = before and not words.are_unchanged()
    del held
    return noticed


def _eight_zeros() -> torch.Tensor:
    return torch.zeros(8, device="cpu")


def _replace(tensor: torch.Tensor) -> object:
    before = tensor.untyped_storage()
    tensor.data = _eight_zeros()
    return before


def _move_on(tensor: torch.Tensor) -> object:
    tensor.data = tensor.data[1:]
    return None


def _resize(tensor: torch.Tensor) -> object:
    tensor.untyped_storage().resize_(1 << 16)
    return None


def _swap(tensor: torch.Tensor) -> object:
    other = _eight_zeros()
    torch.utils.swap_tensors(tensor, other)
    return other


_CHANGES = (_replace, _move_on, _resize, _swap)
