"""Where a captured step gets its batches from: data on the device, or a loader.

A graph repeats the same kernels at the same addresses. Data that are on the device are gathered within the graph: the
epoch's order of samples is there, too, and so is the place in it, which the graph itself advances. Batches of a loader
arrive while the step before computes (:mod:`manyhands.training.torch.data.feed`), and are then copied to where the
graph reads them, which takes a kernel or two.

Graphs are told apart by the kind of a micro-batch: shapes, dtypes and strides of its tensors. A plain value in a batch
(the name of a file, say) belongs to its kind only if the step reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands import tree
from manyhands.backends.torch import compat
from manyhands.errors import CannotCompile, type_in_words
from manyhands.training.data.order import Window
from manyhands.training.torch.data.batches import Batch, Shard
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast.python_state import unread

_PLAIN = (str, bytes, bool, int, float)


class DeviceCounter:
    """A number on the device that graphs advance, and the host knows without asking."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), dtype=torch.int64, device=device)
        self._known: int | None = None

    def go_to(self, number: int, advanced: int) -> None:
        """Set it, where it is not there already; the work that follows advances it by ``advanced``."""
        if self._known != number:
            self.tensor.fill_(number)
        self._known = number + advanced

    def forget(self) -> None:
        """The work that should have advanced it has failed."""
        self._known = None


class MicroBatch:
    """One micro-batch, from where it comes to where a graph reads it."""

    size: int
    shapes: tuple[torch.Size, ...] = ()  # of its tensors, where they differ from batch to batch
    kind: Hashable  # micro-batches of one kind have one graph

    def load(self, *, recorded: bool) -> None:
        """Called before the work runs; ``recorded``: by a graph, which reads the batch from its own place."""
        raise NotImplementedError

    def batch(self, *, recorded: bool) -> Batch:
        """The batch itself, within that work."""
        raise NotImplementedError

    def finish(self) -> None:
        """What the recorded work does at its end."""


class StepInputs:
    """The batches of a job."""

    read_at: str | None = None  # the line that reads a plain value of a batch, if the step reads any

    def begin_epoch(self, order: NDArray[np.int64]) -> None:
        """Begin an epoch with this order of samples; a loader has its own."""

    def parts(self, window: Window, shard: Shard | None) -> Sequence[MicroBatch]:
        """The micro-batches of this rank's shard; a ``CannotCompile`` says why they cannot be captured."""
        raise NotImplementedError

    def forget_place(self) -> None:
        """A step has failed: the device may stand somewhere else in the epoch."""

    def read_values(self) -> bool:
        """From now on plain values count as read; False where none was watched: then the failure is another's fault."""
        return False


class ResidentInputs(StepInputs):
    """Data on the device, the epoch's order of samples, and the place in it where the next micro-batch begins."""

    def __init__(
        self, data: Arrays, device: torch.device, spans: Callable[[Window], Sequence[tuple[int, int]]]
    ) -> None:
        """``spans``: where each micro-batch of this rank begins and ends in the epoch's order."""
        self._data, self._spans = data, spans
        self._order = torch.zeros(data.count, dtype=torch.int64, device=device)
        self._place = DeviceCounter(device)
        self._ranges: dict[int, torch.Tensor] = {}

    def begin_epoch(self, order: NDArray[np.int64]) -> None:
        numbers = torch.from_numpy(order)
        self._order.copy_(numbers.pin_memory() if self._order.is_cuda else numbers, non_blocking=True)

    def parts(self, window: Window, shard: Shard | None) -> Sequence[MicroBatch]:
        return [_ResidentPart(self, begin, stop - begin) for begin, stop in self._spans(window)]

    def forget_place(self) -> None:
        self._place.forget()

    def go_to(self, begin: int, size: int) -> None:
        """The next micro-batch begins here; mostly the one before has left the place there."""
        self._place.go_to(begin, size)
        if size not in self._ranges:
            self._ranges[size] = torch.arange(size, device=self._order.device)

    def take(self, size: int) -> Batch:
        return self._data.take(self._order.index_select(0, self._place.tensor + self._ranges[size]))

    def advance(self, size: int) -> None:
        self._place.tensor += size


class _ResidentPart(MicroBatch):
    def __init__(self, inputs: ResidentInputs, begin: int, size: int) -> None:
        self.inputs, self.begin = inputs, begin
        self.size = self.kind = size

    def load(self, *, recorded: bool) -> None:
        self.inputs.go_to(self.begin, self.size)

    def batch(self, *, recorded: bool) -> Batch:
        return self.inputs.take(self.size)

    def finish(self) -> None:
        self.inputs.advance(self.size)


class LoaderInputs(StepInputs):
    """Batches that arrive on the device, and for each kind of them the memory where a graph reads them."""

    def __init__(self) -> None:
        self._memory: dict[Hashable, list[torch.Tensor]] = {}
        self.read: set[int] = set()  # the plain values that are read, by their places in a batch
        self._watched: set[int] = set()  # in a step since the newest failure

    def parts(self, window: Window, shard: Shard | None) -> Sequence[MicroBatch]:
        batches = () if shard is None else zip(shard.parts, shard.sizes, strict=True)
        return [LoadedPart(self, batch, size) for batch, size in batches]

    def watch(self, place: int, value: Any) -> Any:
        """A plain value that notices being read, unless it is known to be read."""
        if place in self.read:
            return value
        self._watched.add(place)
        return unread(value, functools.partial(self._note_read, place))

    def read_values(self) -> bool:
        watched, self._watched = self._watched, set()
        for place in watched:
            self._note_read(place, "in compiled code")
        return bool(watched)

    def _note_read(self, place: int, line: str) -> None:
        self.read.add(place)
        self.read_at = self.read_at or line

    def memory(self, kind: Hashable, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where a graph reads tensors of this kind."""
        if kind not in self._memory:
            self._memory[kind] = [torch.empty_like(tensor) for tensor in tensors]
        return self._memory[kind]


class LoadedPart(MicroBatch):
    """A micro-batch of a loader; it is on the device, or on its way there."""

    def __init__(self, inputs: LoaderInputs, batch: Batch, size: int) -> None:
        self._inputs, self.size = inputs, size
        self._leaves, self._structure = tree.flatten(batch)
        self._tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        values = {place: leaf for place, leaf in enumerate(self._leaves) if not isinstance(leaf, torch.Tensor)}
        _check(self._tensors, values.values())
        self.shapes = tuple(tensor.shape for tensor in self._tensors)
        looks = tuple((tensor.shape, tensor.dtype, tensor.device, tensor.stride()) for tensor in self._tensors)
        read = tuple((place, value) for place, value in values.items() if place in inputs.read)
        self.kind = (self._structure, looks, read)

    def load(self, *, recorded: bool) -> None:
        if recorded and self._tensors:
            compat.foreach_copy_(self._inputs.memory(self.kind, self._tensors), self._tensors)

    def batch(self, *, recorded: bool) -> Batch:
        tensors = iter(self._inputs.memory(self.kind, self._tensors) if recorded else self._tensors)
        return self._structure.unflatten(
            next(tensors).detach() if isinstance(leaf, torch.Tensor) else self._inputs.watch(place, leaf)
            for place, leaf in enumerate(self._leaves)
        )


def _check(tensors: Sequence[torch.Tensor], others: Iterable[Any]) -> None:
    """Refuse what a graph cannot read from the same place each time."""
    odd = next((tensor for tensor in tensors if tensor.layout != torch.strided or tensor.is_nested), None)
    if odd is not None:
        raise CannotCompile("a batch has a sparse or nested tensor, which has no fixed place in memory")
    other = next((value for value in others if type(value) not in _PLAIN), None)
    if other is not None:
        raise CannotCompile(f"a batch has {type_in_words(other)}: give tensors, numbers and strings")
