"""Keeps ``torch.Tensor`` from becoming a C sequence when ``Tensor.__getitem__`` is replaced.

PyTorch's tensors have ``x[i]`` as mappings have it. A method written in Python fills the slot of sequences, too, and
then ``torch.tensor([x])`` asks a tensor without dimensions for its length, and takes one with a single element for a
nested list. Nothing in Python empties a slot, so it is written in memory, after the layout of types was checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

_WORD = ctypes.sizeof(ctypes.c_void_p)
# Words of PyTypeObject after its header, and of PySequenceMethods, since Python 3.0.
_BASICSIZE, _AS_SEQUENCE, _ITEM = 1, 10, 3


def _word(address: int) -> ctypes.c_size_t:
    return ctypes.c_size_t.from_address(address)


def _fields(kind: type) -> int:
    """The address of the first field of a type."""
    return id(kind) + object.__basicsize__ + _WORD


def _item_slot(kind: type) -> ctypes.c_size_t:
    return _word(_word(_fields(kind) + _AS_SEQUENCE * _WORD).value + _ITEM * _WORD)


def _layout_is_known() -> bool:
    class Sequence:
        def __getitem__(self, index: int) -> int:
            return index

    class Other(Sequence):
        """It has the same function in its slot."""

    if any(_word(_fields(kind) + _BASICSIZE * _WORD).value != kind.__basicsize__ for kind in (Sequence, torch.Tensor)):
        return False
    return _item_slot(Sequence).value == _item_slot(Other).value == _item_slot(torch.Tensor).value != 0


def _empty_slot(kind: type) -> None:
    if next(base for base in kind.__mro__ if "__getitem__" in vars(base)) is torch.Tensor:
        _item_slot(kind).value = 0


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _subclasses(derived)


def _init_subclass(kind: type[Any], /, **arguments: Any) -> None:
    super(torch.Tensor, kind).__init_subclass__(**arguments)
    _empty_slot(kind)


def replace_getitem(method: Any) -> None:
    """Set ``Tensor.__getitem__`` and leave tensors no sequences; where that cannot be, nothing is set."""
    is_sequence: Any = ctypes.pythonapi.PySequence_Check
    is_sequence.argtypes, is_sequence.restype = (ctypes.py_object,), ctypes.c_int
    tensor_class: Any = torch.Tensor
    was_sequence = is_sequence(torch.empty(()))  # another library may have made it one
    tensor_class.__getitem__ = method
    if was_sequence:
        return
    if not _layout_is_known():
        del tensor_class.__getitem__
        return
    for kind in _subclasses(tensor_class):
        _empty_slot(kind)
    tensor_class.__init_subclass__ = classmethod(_init_subclass)
