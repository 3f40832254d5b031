"""Recognises a call that is like an earlier one, in a few microseconds and without building its signature.

Building a signature (:mod:`.call`) means a walk over a tree, a tuple of tuples and a hash. Most calls are like the one
before, so for every planned call the checks that make up its signature are generated as straight-line code that stops
at the first mismatch. For ``f(x, [w, 2])`` it reads

    def fits(arguments, keywords):
        if type(arguments) is not tuple or len(arguments) != 2: return None
        v0, v1, = arguments
        ...
        if v4 is not 2 and (type(v4) is not int or v4 != 2): return None
        if is_grad_enabled() != k9: return None
        ...
        if not check(v0, v3): return None
        addresses = v0.data_ptr(), v3.data_ptr()
        if addresses != seen[0]:
            if len({v0's storage, v3's storage}) != 2: return None
            if not apart(addresses, (64, 64)): return None
            seen[0] = addresses
        tensors = AddressedTensors((v0, v3))
        tensors.addresses = addresses
        return tensors

``check`` is PyTorch's own, with which Dynamo guards its code: type, shape, strides, dtype, device and ``requires_grad``
of all tensors at once. Tensors of the same shape and strides at the same addresses overlap as they did before.

A match means that the signature is the same. A mismatch means nothing: then the signature is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from manyhands.backends.torch import compat
from manyhands.backends.torch.addresses import shown_by
from manyhands.backends.torch.capture import call
from manyhands.backends.torch.capture.call import Call
from manyhands.backends.torch.capture.refusals import BY_VALUE
from manyhands.backends.torch.compat import TensorGuards
from manyhands.backends.torch.virtual import home
from manyhands.python_code.generated import function

Fits = Callable[[tuple[Any, ...], dict[str, Any]], "list[torch.Tensor] | None"]


class AddressedTensors(list[torch.Tensor]):
    """The tensors of a recognised call with their addresses, which a run may need, too."""

    __slots__ = ("addresses",)
    addresses: tuple[int, ...]


_EXACT = (bool, int, str, bytes)  # equal values of these types have the same repr


def recogniser(call: Call) -> Fits | None:
    """A check for calls like this one; None if only a signature can tell calls apart."""
    writer = _Writer(call)
    try:
        writer.walk(call.arguments, "arguments")
        writer.walk(call.keywords, "keywords")
    except _Unknown:
        return None
    return writer.build()


class _Unknown(Exception):
    """A part of the arguments that only the signature can compare."""


class _Writer:
    def __init__(self, like: Call) -> None:
        self._call = like
        self._lines: list[str] = []
        self._tensors: dict[int, str] = {}
        self._storages: list[str] = []
        self._gradients: list[str] = []  # checks of tensors that require gradients: the function may look at .grad
        self._fixed: list[str] = []  # checks of parameters: they must not move
        self._names: dict[str, Any] = {
            **call.MODE_NAMES,
            "AddressedTensors": AddressedTensors,
            "seen": [None],
            "apart": _apart,
        }
        if any(home(tensor).type == "cuda" for tensor in like.tensors):  # CUDA is there: no need to check that first
            self._names["capturing"] = compat.is_current_stream_capturing
        self._count = 0

    def _name(self, value: Any) -> str:
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name

    def _refuse_if(self, condition: str) -> None:
        self._lines.append(f"if {condition}: return None")

    def walk(self, value: Any, name: str) -> None:
        if type(value) in (tuple, list):
            self._refuse_if(f"type({name}) is not {type(value).__name__} or len({name}) != {len(value)}")
            parts = [self._part() for _ in value]
            if parts:
                self._lines.append(f"{', '.join(parts)}, = {name}")
            for part, item in zip(parts, value, strict=True):
                self.walk(item, part)
        elif type(value) is dict:
            self._refuse_if(f"type({name}) is not dict or list({name}) != {self._name(list(value))}")
            for key, item in value.items():
                part = self._part()
                self._lines.append(f"{part} = {name}[{self._name(key)}]")
                self.walk(item, part)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, name)
        elif type(value) in _EXACT:
            known = self._name(value)
            self._refuse_if(f"{name} is not {known} and (type({name}) is not type({known}) or {name} != {known})")
        elif isinstance(value, BY_VALUE):
            known = self._name(value)
            other = f"type({name}) is not type({known}) or repr({name}) != {self._name(repr(value))}"
            self._refuse_if(f"{name} is not {known} and ({other})")
        elif any(value is leaf for leaf in self._call.others):
            self._refuse_if(f"{name} is not {self._name(value)}")
        else:  # a node of the tree that is not a plain list, tuple or dict
            raise _Unknown

    def _part(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _tensor(self, tensor: torch.Tensor, name: str) -> None:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise _Unknown
        if id(tensor) in self._tensors:  # the same tensor twice
            raise _Unknown
        self._tensors[id(tensor)] = name
        if type(tensor) is nn.Parameter:
            self._fixed.append(f"{name}.data_ptr() != {tensor.data_ptr()}")
        if tensor.requires_grad:
            self._gradients.append(f"{name}.is_leaf is not {tensor.is_leaf}")
            if tensor.is_leaf:
                self._gradients.append(f"({name}.grad is None) is not {tensor.grad is None}")
        if tensor.numel():  # an empty tensor has no memory to share
            self._storages.append(f"{name}.data_ptr() - {name}.storage_offset() * {tensor.element_size()}")

    def build(self) -> Fits:
        names = [self._tensors[id(tensor)] for tensor in self._call.tensors]
        for expression, value in zip(call.MODES, call.modes(), strict=True):
            self._refuse_if(f"({expression}) != {self._name(value)}")
        if names:
            self._refuse_if(f"not {self._name(tensor_guards(self._call.tensors))}({', '.join(names)})")
            for expression in self._gradients:
                self._refuse_if(expression)
            if self._call.shares_memory:  # then two arguments may be the same tensor
                self._refuse_if(f"len({{{', '.join(f'id({name})' for name in names)}}}) != {len(names)}")
            self._lines.append(f"addresses = {', '.join(f'{name}.data_ptr()' for name in names)},")
            questions = [*self._fixed, *self._shared()]
            inner = [f"    if {expression}: return None" for expression in questions]
            self._lines += ["if addresses != seen[0]:", *inner, "    seen[0] = addresses"]
            self._lines += [f"tensors = AddressedTensors(({', '.join(names)},))", "tensors.addresses = addresses"]
            self._lines.append("return tensors")
        else:
            self._lines.append("return []")
        body = "\n".join(f"        {line}" for line in self._lines)
        # If a check raises, the signature is built, and deals with the cause.
        source = f"def fits(arguments, keywords):\n    try:\n{body}\n    except Exception:\n        return None"
        return function("signature", source, self._names)

    def _shared(self) -> list[str]:
        """Checks that tensors share memory as they did."""
        if len(self._tensors) < 2:
            return []
        shares = self._call.shares_memory
        if shares and len(self._storages) < len(self._tensors):
            return ["True"]
        # A tensor's address less its offset is the address of its storage: equal for two tensors only if they share
        # it. Two storages in one memory (from_numpy) matter only if the tensors overlap, which apart() checks.
        size = f"len({{{', '.join(self._storages)}}})" if self._storages else "0"
        if shares:
            return [f"{size} >= {len(self._storages)}"]
        lengths = self._name(tuple(end - start for start, end in map(shown_by, self._call.tensors)))
        return [f"{size} != {len(self._storages)}", f"not apart(addresses, {lengths})"]


def _apart(addresses: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether pieces of memory, given by address and length, do not overlap."""
    behind = 0
    for place, length in sorted(zip(addresses, lengths, strict=True)):
        if length and place < behind:
            return False
        behind = max(behind, place + length)
    return True


def tensor_guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A check that as many tensors are like these: type, shape, strides, dtype, device, requires_grad."""
    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
