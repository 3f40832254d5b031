"""Deferred results: a note describes what belongs in their memory, and a mode writes it before anything reads it.

A model may use streams of its own. Results are deferred only on the stream of the pass, and written only there. Such a
write comes later than the program says, and so perhaps after the model has let another stream wait for the stream of
the pass. So before an operation on another stream, that stream waits for all late writes that it has not waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from manyhands.amounts import count_of
from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import TorchDispatchMode, memory_id
from manyhands.backends.torch.kernels import batch_norm as kernels
from manyhands.training.torch.fast.operations import has_memory, is_view, memories_of, written_by
from manyhands.training.torch.fast.recorder import current_stream

_aten = torch.ops.aten


class Statistics:
    """Mean and rstd of a normalisation's input, computed when its result is written, or when they are read."""

    def __init__(self, x: torch.Tensor, running: tuple[Any, Any], momentum: float, epsilon: float) -> None:
        self._x, self._running, self._options = x, running, (momentum, epsilon)
        self.mean, self.rstd = kernels.per_channel(x, running[0]), kernels.per_channel(x, running[0])
        self.taken = False

    def take(self, y: torch.Tensor | None = None, *behind: Any) -> None:
        """Compute the statistics; with ``y``, the same kernel also writes the normalised result, addition and ReLU."""
        if not self.taken:
            self.taken = True
            behind = behind or (None, None, None, False)
            kernels.forward_(y, self.mean, self.rstd, self._x, *self._running, *self._options, *behind)

    def memories(self) -> set[int]:
        """The memory that :meth:`take` writes to."""
        return {memory_id(tensor) for tensor in (self.mean, self.rstd, *self._running) if tensor is not None}


@dataclass
class Norm:
    """A pending normalisation: its input, the statistics of the batch, and what is added to the result."""

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
            kernels.apply_(y, self.x, self.mean, self.statistics.rstd, *behind)
        else:
            self.statistics.take(y, *behind)

    def read(self) -> list[torch.Tensor | None]:
        return [self.x, self.mean, self.statistics.rstd, self.weight, self.bias, self.added]

    def has_backward(self) -> bool:
        """Whether autograd records it: a frozen layer whose input needs no gradient has no backward."""
        parts = (self.x, self.weight, self.bias)
        return torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in parts)


@dataclass
class PendingSum:
    """A pending sum of two gradients; ``first`` is None if the sum is in place: the memory still holds it."""

    first: torch.Tensor | None
    second: torch.Tensor

    def write(self, y: torch.Tensor) -> None:
        if self.first is None:
            y.add_(self.second)
        else:
            torch.add(self.first, self.second, out=y)

    def read(self) -> list[torch.Tensor | None]:
        return [self.first, self.second]


@dataclass
class Gradient:
    """A pending backward of a ReLU: the incoming gradient, perhaps in two terms, and the ReLU's result."""

    gradient: torch.Tensor
    more: torch.Tensor | None
    result: torch.Tensor
    number: int  # the gradient's number in the step

    def write(self, y: torch.Tensor) -> None:
        gradient = self.gradient if self.more is None else torch.add(self.gradient, self.more, out=y)
        _aten.threshold_backward.grad_input(gradient, self.result, 0, grad_input=y)

    def read(self) -> list[torch.Tensor | None]:
        return [self.gradient, self.more, self.result]


class Pending(Protocol):
    """A deferred result."""

    def write(self, y: torch.Tensor) -> None: ...

    def read(self) -> list[torch.Tensor | None]:
        """The tensors that it is computed from."""


class Note:
    """Describes the result that belongs in unwritten memory."""

    def __init__(self, y: torch.Tensor, pending: Pending) -> None:
        self.pending = pending
        self.memory = StorageWeakRef(y.untyped_storage())  # a weak reference keeps the storage's id from being reused
        self._kind: Any = {"dtype": y.dtype, "device": y.device}
        self._where = y.storage_offset(), y.shape, y.stride()

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the noted result itself, and not another view of its memory."""
        where = tensor.storage_offset(), tensor.shape, tensor.stride()
        return self._kind["dtype"] is tensor.dtype and self._where == where

    def tensor(self) -> torch.Tensor | None:
        """The memory as a tensor; None if no tensor uses it any more."""
        storage = compat.storage_from_weak_pointer(self.memory.cdata)
        return None if storage is None else torch.empty(0, **self._kind).set_(storage, *self._where)

    @torch.no_grad()  # autograd has recorded the operations already
    def write(self) -> None:
        """Write the result, unless its memory was freed."""
        if (tensor := self.tensor()) is not None:
            self.pending.write(tensor)

    def read(self) -> set[int]:
        return {memory_id(tensor) for tensor in self.pending.read() if tensor is not None}


class DeferringMode(TorchDispatchMode):
    """A dispatch mode that defers results, and writes them before another operation reads them."""

    def __init__(self, handlers: Mapping[Any, Callable[..., Any]], normalisation: str) -> None:
        """``handlers``: the replacements of operations; a replacement may return ``NotImplemented``.

        ``normalisation``: what is fused, in words; counted under its plural.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._handlers, self._normalisation = handlers, normalisation
        self._poison = False  # whether unwritten memory is filled with NaN
        self.counts = Counter[str]()  # the fused operations of the step, by kind
        self._notes: dict[int, Note] = {}
        self._stream: torch.cuda.Stream | None = None  # the stream of the pass
        self._late_writes = 0  # how often deferred results were written
        self._waited_for: dict[torch.cuda.Stream, int] = {}  # of them, by other streams

    def __enter__(self) -> Self:
        self._stream = current_stream()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (stream := current_stream()) is not None and stream != self._stream:
            self._settle_for(stream, func, args, kwargs)
            return func(*args, **kwargs)
        self._forget()
        handler = self._handlers.get(func)
        result = handler(self, func, *args, **kwargs) if handler is not None else NotImplemented
        if result is not NotImplemented:
            return result
        self._settle_before(func, args, kwargs)
        return func(*args, **kwargs)

    def _settle_for(self, stream: torch.cuda.Stream, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare an operation on another stream: write on the stream of the pass, and let the other stream wait."""
        with torch.cuda.stream(self._stream):
            self._forget()
            self._settle_before(func, args, kwargs)
        if self._waited_for.get(stream, 0) != self._late_writes and self._stream is not None:
            stream.wait_stream(self._stream)
            self._waited_for[stream] = self._late_writes

    def _settle_before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write what this operation reads, and what it is about to change the inputs of."""
        if not is_view(func):
            self._settle((args, kwargs))
            self._settle_before_writing(func, args, kwargs)

    def _defer(self, y: torch.Tensor, pending: Pending) -> torch.Tensor:
        """Note what belongs in this memory, which is not written yet."""
        if self._poison:
            y.fill_(float("nan"))
        self._notes[memory_id(y)] = Note(y, pending)
        return y

    def _note(self, tensor: Any) -> Note | None:
        """The note of a tensor's memory, unless the tensor is another view of it."""
        note = self._notes.get(memory_id(tensor)) if has_memory(tensor) else None
        return note if note is not None and note.is_of(tensor) else None

    def _forget(self) -> None:
        """Drop the notes of freed memory."""
        self._notes = {number: note for number, note in self._notes.items() if not note.memory.expired()}

    def _settle(self, values: Any) -> None:
        """Write the pending results among these values: an operation is about to read them."""
        if self._notes:
            self._write(memories_of(values))

    def _settle_before_writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write pending results whose inputs are about to change."""
        if changed := memories_of(written_by(func, args, kwargs)):
            self._write_readers_of(changed)

    def _write_readers_of(self, memories: set[int]) -> None:
        self._write([number for number, note in self._notes.items() if note.read() & memories])

    def _write(self, numbers: Iterable[int]) -> None:
        """Write the pending results in these memories."""
        for number in numbers:
            note = self._notes.pop(number, None)
            if note is not None:
                note.write()
                self._late_writes += 1

    def explain(self) -> str:
        """Which operations were fused, in words."""
        rest = dict(self.counts)
        norms = count_of(rest.pop(f"{self._normalisation}s", 0), self._normalisation)
        return "fused: " + ", ".join([norms, *(f"{count} {kind}" for kind, count in rest.items())])


class Rectified:
    """The result of a ReLU after a normalisation. The backward pass may recompute its sign from the input."""

    def __init__(self, result: torch.Tensor, norm: Norm) -> None:
        self.result = StorageWeakRef(result.untyped_storage())
        self.bias = norm.bias
        self.weight = norm.weight
        # Input, mean and rstd of the normalisation, until its backward is over. Autograd keeps them as long, if
        # there is a backward.
        parts = norm.x.detach(), norm.mean, norm.statistics.rstd
        self.normal: tuple[torch.Tensor, ...] | None = parts if norm.has_backward() else None
        self._taken = {memory_id(tensor) for tensor in (*parts, norm.weight) if tensor is not None}
        self._mean = StorageWeakRef(norm.mean.untyped_storage())  # identifies the call: every call computes a new mean
        self._version = _version(norm.bias)
        self._read = {memory_id(tensor) for tensor in (result, *norm.read()) if tensor is not None}
        self._unchanged = norm.added is None

    def changes(self, changed: set[int]) -> None:
        """Note that memory was written to, perhaps without autograd's knowledge (``bias.data``)."""
        self._unchanged = self._unchanged and not self._read & changed
        if self._taken & changed:
            self.normal = None

    def over(self, mean: torch.Tensor) -> None:
        """Note that the backward of a normalisation, perhaps of this one, is over."""
        if self._mean.cdata == memory_id(mean):
            self.normal = None

    def can_recompute_sign(self, mean: torch.Tensor) -> bool:
        """Whether the kernel can recompute the sign instead of reading the ReLU's result."""
        return self._unchanged and self._mean.cdata == memory_id(mean) and self._version == _version(self.bias)


def _version(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else compat.write_count(tensor)
