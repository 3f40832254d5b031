"""BatchNorm fused with the addition and ReLU that follow it; the model does not change.

A model computes ``relu(norm(conv(x)) + x)``, and PyTorch calls one operation after the other. A dispatch mode defers
the normalisation: it allocates the result without writing it, and notes what belongs there. The next operation on that
memory decides:

    norm                    note: y is norm(x)
    y += shortcut           note: y is norm(x) + shortcut
    z = relu(y)             one kernel writes z = relu(norm(x) + shortcut) and the statistics; y is never written
    anything else with y    one kernel writes y and the statistics, then the other operation runs
    anything that reads     a kernel computes the statistics, then the other operation runs
      the statistics first

In the backward pass, the ReLU and the sum of the two gradients that reach it are deferred in the same way. If the
normalisation's backward reads them next, one kernel computes everything. If another operation reads that gradient too
(the shortcut does), the same kernel also writes it, from the second step on. If the other operation comes first (a
convolution in the shortcut), the first half of the normalisation's backward runs then and writes the gradient; the
second half runs later.

This works for any model and changes neither autograd's graph nor the tensors that it saves. But a mode cannot see reads
that bypass PyTorch, by a kernel that gets an address. So the first step fills unwritten memory with NaN, and if NaN
reaches the loss, a gradient or a buffer, the job continues without these kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from manyhands.backends.torch.compat import memory_id
from manyhands.backends.torch.kernels import batch_norm as kernels
from manyhands.training.torch.fast.norms.pending import (
    DeferringMode,
    Gradient,
    Norm,
    Note,
    PendingSum,
    Rectified,
    Statistics,
)
from manyhands.training.torch.fast.operations import memories_of, written_by

_aten = torch.ops.aten


class FusedBatchNorms(DeferringMode):
    """Use it around the forward and backward passes, as the innermost mode::

        norms.begin(poison=False)
        with norms:
            loss = loss_of(model)
        with lanes, norms:
            loss.backward()

    ``counts``: the fused operations of the step, by kind.
    """

    def __init__(self) -> None:
        super().__init__(_HANDLERS, "batch normalisation")
        self._wanted: set[int] = set()
        self._wanted_before: set[int] = set()  # gradients that another operation read too, in the previous step
        self.begin(poison=False)

    def begin(self, *, poison: bool) -> None:
        """Begin a step. ``poison``: fill unwritten memory with NaN, to detect reads of it."""
        self._poison = poison
        self._wanted_before, self._wanted = self._wanted or self._wanted_before, set()
        self._notes = {}
        self._untaken: list[Statistics] = []
        self._rectified: dict[int, Rectified] = {}
        self._shapes: set[torch.Size] = set()  # the shapes of these ReLUs' results
        # For each gradient that was written early, by its memory: the mean of its normalisation, and the sums for it.
        self._reduced: dict[int, tuple[StorageWeakRef, int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._gradients = 0
        self.counts = Counter[str]()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            self._write(list(self._notes))  # something may read them later
            self._take(self._untaken)
        self._notes, self._untaken = {}, []

    # Forward

    def _norm(
        self, func: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *how: float
    ) -> Any:
        self._settle((x, weight, bias, mean, variance))
        if not training or not kernels.fits(x, weight, bias, mean, variance):
            return NotImplemented
        statistics = Statistics(x, (mean, variance), *how)
        if self._poison:
            statistics.mean.fill_(float("nan"))
            statistics.rstd.fill_(float("nan"))
        self._untaken.append(statistics)
        self.counts["batch normalisations"] += 1
        return self._defer(torch.empty_like(x), Norm(x, statistics, weight, bias)), statistics.mean, statistics.rstd

    def _add(self, func: Any, tensor: Any, other: Any, *, alpha: Any = 1) -> Any:
        note, added = self._note(tensor), other
        if note is None and func is _aten.add.Tensor:
            note, added = self._note(other), tensor
        if note is None or not isinstance(note.pending, Norm) or note.pending.added is not None or alpha != 1:
            return self._sum(func, tensor, other) if alpha == 1 else NotImplemented
        fitting = isinstance(added, torch.Tensor) and _same_form(added, note.pending.x)
        if not fitting or memory_id(added) == note.memory.cdata:
            return NotImplemented
        self._settle(added)
        pending = replace(note.pending, added=added)
        if func is _aten.add.Tensor:
            return self._defer(torch.empty_like(tensor), pending)
        note.pending = pending
        return tensor

    def _sum(self, func: Any, first: Any, second: Any) -> Any:
        """Defer the sum of two gradients with the shape of a ReLU's result: the ReLU's backward may read it."""
        both = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and first.shape in self._shapes
        if (
            torch.is_grad_enabled()
            or not both
            or not _same_form(first, second)
            or memory_id(first) == memory_id(second)
        ):
            return NotImplemented
        self._settle((first, second))
        if func is _aten.add.Tensor:
            return self._defer(torch.empty_like(first), PendingSum(first, second))
        self._settle_before_writing(func, (first, second), {})
        before = first.clone() if self._poison else None  # None: the memory still holds it
        if self._poison:
            first.fill_(float("nan"))
        self._notes[memory_id(first)] = Note(first, PendingSum(before, second))
        return first

    def _relu(self, func: Any, y: Any) -> Any:
        note = self._note(y)
        if note is None or not isinstance(note.pending, Norm):
            return NotImplemented
        norm = note.pending
        result = y if func is _aten.relu_.default else torch.empty_like(norm.x)
        norm.write(result, relu=True)
        self._late_writes += 1  # of its statistics
        if result is y:
            del self._notes[memory_id(y)]
        self._rectified[memory_id(result)] = Rectified(result, norm)
        self._shapes.add(result.shape)
        self.counts["with ReLU" if norm.added is None else "with addition and ReLU"] += 1
        return result

    # Backward

    def _relu_backward(self, func: Any, gradient: Any, result: Any, threshold: Any) -> Any:
        rectified = self._rectified.get(memory_id(result))
        self._settle(result)
        if rectified is None or rectified.result.expired() or threshold != 0 or not _same_form(gradient, result):
            return NotImplemented
        note, first, more = self._note(gradient), gradient, None
        if note is not None and isinstance(note.pending, PendingSum):
            first, more = gradient if note.pending.first is None else note.pending.first, note.pending.second
        else:
            self._settle(gradient)
        self._gradients += 1
        return self._defer(torch.empty_like(gradient), Gradient(first, more, result, self._gradients))

    def _norm_backward(
        self, func: Any, gradient: Any, x: Any, weight: Any, mean: Any, variance: Any, *rest: Any
    ) -> Any:
        batch_mean, rstd, training, _, mask = rest
        self._settle((x, weight, batch_mean, rstd))
        for rectified in self._rectified.values():
            rectified.over(batch_mean)
        if not training or not kernels.fits(x, weight, batch_mean, rstd) or not _same_form(gradient, x):
            return NotImplemented
        note = self._note(gradient)
        pending = note.pending if note is not None else None
        normal: Any = (x, batch_mean, rstd, weight)
        sums = self._sums_of(gradient, batch_mean) if pending is None else None
        if sums is not None:
            gradients = kernels.input_gradient(gradient, *normal, *sums), *sums
        elif isinstance(pending, Gradient):
            rectified, written = self._rectified[memory_id(pending.result)], None
            wanted = pending.number in self._wanted_before
            if wanted or pending.more is not None:  # the same kernel writes the gradient, too
                written = gradient
                self._late_writes += 1
                self._wanted |= {pending.number} if wanted else set()
                del self._notes[memory_id(gradient)]
            result = None if rectified.can_recompute_sign(batch_mean) else pending.result
            gradients = kernels.backward(pending.gradient, pending.more, *normal, rectified.bias, result, True, written)
            self.counts["backward past the ReLU"] += 1
            self.counts["of them of a sum"] += pending.more is not None
        else:
            self._settle(gradient)
            gradients = kernels.backward(gradient, None, *normal, None, None, False, None)
        return tuple(each if wanted else None for each, wanted in zip(gradients, mask, strict=True))

    # Notes

    def _forget(self) -> None:
        """Drop notes of memory that was freed. Their running statistics are updated all the same."""
        super()._forget()
        if self._untaken:
            noted = [note.pending.statistics for note in self._notes.values() if isinstance(note.pending, Norm)]
            self._take([statistics for statistics in self._untaken if statistics not in noted])

    def _take(self, statistics: Iterable[Statistics]) -> None:
        with torch.no_grad():
            for each in statistics:
                each.take()
                self._late_writes += 1
        self._untaken = [each for each in self._untaken if not each.taken]

    def _settle(self, values: Any) -> None:
        """Write pending results that are read now."""
        if self._notes:
            memories = memories_of(values)
            self._write(memories)
            self._take([each for each in self._untaken if each.memories() & memories])

    def _settle_before_writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write pending results whose inputs are about to change."""
        super()._settle_before_writing(func, args, kwargs)
        if changed := memories_of(written_by(func, args, kwargs)):
            for rectified in self._rectified.values():
                rectified.changes(changed)
            for memory in changed:
                self._reduced.pop(memory, None)

    def _write(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            note = self._notes.pop(number, None)
            if note is None:
                continue
            self._late_writes += 1
            if (
                isinstance(note.pending, PendingSum) and note.pending.first is None
            ):  # in place: others read the old value
                self._write_readers_of({number})
            if not isinstance(note.pending, Gradient):
                note.write()
                continue
            self._wanted.add(note.pending.number)
            if not self._reduce(note, note.pending):
                note.write()

    @torch.no_grad()
    def _reduce(self, note: Note, pending: Gradient) -> bool:
        """Write a gradient with the first half of its normalisation's backward; False if there is no such backward."""
        rectified = self._rectified.get(memory_id(pending.result))
        masked_gradient = note.tensor()
        if rectified is None or rectified.normal is None or masked_gradient is None:
            return False
        x, mean, rstd = rectified.normal
        result = None if rectified.can_recompute_sign(mean) else pending.result
        parts = (x, mean, rstd, rectified.weight, rectified.bias, result)
        sums = kernels.reduce_(masked_gradient, pending.gradient, pending.more, *parts)
        storage = StorageWeakRef(masked_gradient.untyped_storage())
        self._reduced[memory_id(masked_gradient)] = storage, memory_id(mean), sums
        self.counts["backward past the ReLU"] += 1
        self.counts["of them of a sum"] += pending.more is not None
        return True

    def _sums_of(self, gradient: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sums that :meth:`_reduce` has computed for this backward."""
        memory, its_mean, sums = self._reduced.get(memory_id(gradient), (None, 0, None))
        return sums if memory is not None and not memory.expired() and its_mean == memory_id(mean) else None


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.native_batch_norm.default: FusedBatchNorms._norm,
    _aten.add.Tensor: FusedBatchNorms._add,
    _aten.add_.Tensor: FusedBatchNorms._add,
    _aten.relu.default: FusedBatchNorms._relu,
    _aten.relu_.default: FusedBatchNorms._relu,
    _aten.threshold_backward.default: FusedBatchNorms._relu_backward,
    _aten.native_batch_norm_backward.default: FusedBatchNorms._norm_backward,
}


def is_clean(values: Iterable[torch.Tensor]) -> bool:
    """Whether no tensor contains NaN; the host waits for the answer."""
    has_nan = [value.isnan().any() for value in values if value.is_floating_point()]
    return not has_nan or not bool(torch.stack(has_nan).any())


def _same_form(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    same = tensor.shape == other.shape and tensor.dtype == other.dtype and tensor.device == other.device
    return same and kernels.fits(tensor) and kernels.fits(other)
