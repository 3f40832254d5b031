"""What :mod:`.fused_norm` notes of memory that nobody has written to yet: what belongs there, how it gets there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import memory_id
from manyhands.backends.torch.kernels import batch_norm as kernels

_aten = torch.ops.aten


class Statistics:
    """Mean and deviation of what a normalisation was given; they are taken when its result is written, or is wanted."""

    def __init__(self, x: torch.Tensor, running: tuple[Any, Any], momentum: float, epsilon: float) -> None:
        self._x, self._running, self._how = x, running, (momentum, epsilon)
        self.mean, self.deviation = kernels.per_channel(x, running[0]), kernels.per_channel(x, running[0])
        self.taken = False

    def take(self, y: torch.Tensor | None = None, *behind: Any) -> None:
        """Take them; and write what is normalised by them, given what is behind it, in one go."""
        if not self.taken:
            self.taken = True
            behind = behind or (None, None, None, False)
            kernels.forward_(y, self.mean, self.deviation, self._x, *self._running, *self._how, *behind)

    def memories(self) -> set[int]:
        """What is written when they are taken."""
        return {memory_id(one) for one in (self.mean, self.deviation, *self._running) if one is not None}


@dataclass
class Norm:
    """A normalisation that was called: its input, what is learned of it, and what is added to it."""

    x: torch.Tensor
    statistics: Statistics
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    added: torch.Tensor | None = None

    @property
    def mean(self) -> torch.Tensor:
        return self.statistics.mean

    def write(self, y: torch.Tensor, *, relu: bool = False) -> None:
        behind = (self.weight, self.bias, self.added, relu)
        if self.statistics.taken:
            kernels.apply_(y, self.x, self.mean, self.statistics.deviation, *behind)
        else:
            self.statistics.take(y, *behind)

    def read(self) -> list[torch.Tensor | None]:
        return [self.x, self.mean, self.statistics.deviation, self.weight, self.bias, self.added]


@dataclass
class Sum:
    """A sum of two gradients; in place, the first one is what the memory holds as yet."""

    one: torch.Tensor | None
    other: torch.Tensor

    def write(self, y: torch.Tensor) -> None:
        if self.one is None:
            y.add_(self.other)
        else:
            torch.add(self.one, self.other, out=y)

    def read(self) -> list[torch.Tensor | None]:
        return [self.one, self.other]


@dataclass
class Gradient:
    """A ReLU's backward that was called: the gradient behind it, perhaps the sum of two, and the ReLU's result."""

    gradient: torch.Tensor
    more: torch.Tensor | None
    result: torch.Tensor
    number: int  # of the step's

    def write(self, y: torch.Tensor) -> None:
        gradient = self.gradient if self.more is None else torch.add(self.gradient, self.more, out=y)
        _aten.threshold_backward.grad_input(gradient, self.result, 0, grad_input=y)

    def read(self) -> list[torch.Tensor | None]:
        return [self.gradient, self.more, self.result]


class Note:
    """What belongs into memory that nobody has written to yet."""

    def __init__(self, y: torch.Tensor, what: Norm | Sum | Gradient) -> None:
        self.what = what
        self.memory = StorageWeakRef(y.untyped_storage())  # while it is referred to, no other memory gets its number
        self._kind: Any = {"dtype": y.dtype, "device": y.device}
        self._where = y.storage_offset(), y.shape, y.stride()

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is all of that memory, and not a view of it."""
        return self._kind["dtype"] is tensor.dtype and self._where == (
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )

    @torch.no_grad()  # autograd knows of the operations that were noted; of how they are carried out it need not
    def write(self) -> None:
        """Write what belongs there, if there is anybody left who could read it."""
        storage = compat.storage_from_weak_pointer(self.memory.cdata)
        if storage is not None:
            self.what.write(torch.empty(0, **self._kind).set_(storage, *self._where))

    def read(self) -> set[int]:
        return {memory_id(one) for one in self.what.read() if one is not None}


class Rectified:
    """The result of a ReLU behind a normalisation: it can be told again from what the normalisation was given."""

    def __init__(self, result: torch.Tensor, norm: Norm) -> None:
        self.result = StorageWeakRef(result.untyped_storage())
        self.bias = norm.bias
        self._mean = StorageWeakRef(norm.mean.untyped_storage())  # each call has its own: it names the call
        self._version = _version(norm.bias)
        self._read = {memory_id(one) for one in (result, *norm.read()) if one is not None}
        self._as_it_was = norm.added is None

    def changes(self, changed: set[int]) -> None:
        """Memory was written to, perhaps behind autograd's back (``bias.data``)."""
        self._as_it_was = self._as_it_was and not self._read & changed

    def again(self, mean: torch.Tensor) -> bool:
        """Whether the ReLU's result needs not be read: it is above zero where the normalisation with that mean is."""
        return self._as_it_was and self._mean.cdata == memory_id(mean) and self._version == _version(self.bias)


def _version(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else compat.write_count(tensor)
