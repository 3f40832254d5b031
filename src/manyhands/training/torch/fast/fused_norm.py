"""Batch normalisation, addition and ReLU in one go, without a change to the model.

A model says ``relu(norm(conv(x)) + x)``, and PyTorch calls one operation after the other. Here a dispatch mode is
active while it does. A normalisation that it sees is not carried out: its result is memory that nobody has written to
yet, and a note says what belongs there. What happens next to that memory decides:

    norm                    note: y is norm(x)
    y += shortcut           note: y is norm(x) + shortcut
    z = relu(y)             one kernel writes z = relu(norm(x) + shortcut) and the statistics; y is never written
    anything else with y    one kernel writes y and the statistics, then the other operation takes it
    anything with the       they are taken by a kernel of their own, then the other operation takes them
      statistics before

Backward it is the same with the ReLU, and with the sum of gradients that come to it from two sides: there are notes
only, and where the normalisation's backward takes them, one operation does it all. If somebody else wants that gradient
as well (the shortcut does), it is written after all, as soon as it is wanted; or, as the step before has shown who
wants what, in passing.

So nothing has to be known of the model, and autograd's graph and what it saves stay what they were. One thing a mode
cannot see: memory that is read past PyTorch, by a kernel that is given an address. The first step therefore fills the
memory of notes with NaN, and if that arrives in the loss, in a gradient or in a buffer, nothing of this is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from manyhands.backends.torch.compat import TorchDispatchMode, memory_id
from manyhands.backends.torch.kernels import batch_norm as kernels
from manyhands.training.torch.fast.fused_norm_pending import Gradient, Norm, Note, Rectified, Statistics, Sum
from manyhands.training.torch.fast.storage import has_memory, is_view, memories_of, written_by

_aten = torch.ops.aten


class FusedNorms(TorchDispatchMode):
    """Around forward and backward passes, inside of other modes::

        norms.begin(poison=False)
        with norms:
            loss = loss_of(model)
        with lanes, norms:
            loss.backward()

    ``told`` counts what the step has done in one go.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wanted: set[int] = set()
        self._wanted_before: set[int] = set()  # gradients that somebody else wanted too, in the step before
        self.begin(poison=False)

    def begin(self, *, poison: bool) -> None:
        """A new step. ``poison``: memory that is only noted is filled with NaN, so that who reads it is found."""
        self._poison = poison
        self._wanted_before, self._wanted = self._wanted or self._wanted_before, set()
        self._notes: dict[int, Note] = {}
        self._untaken: list[Statistics] = []
        self._rectified: dict[int, Rectified] = {}
        self._shapes: set[torch.Size] = set()  # of the results of these ReLUs
        self._gradients = 0
        self.told = Counter[str]()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            self._write(list(self._notes))  # somebody may hold it, and read it later
            self._take(self._untaken)
        self._notes, self._untaken = {}, []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._forget()
        own = _OWN.get(func)
        result = own(self, func, *args, **kwargs) if own is not None else NotImplemented
        if result is not NotImplemented:
            return result
        if not is_view(func):
            self._settle((args, kwargs))
            self._settle_before_writing(func, args, kwargs)
        return func(*args, **kwargs)

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
            statistics.deviation.fill_(float("nan"))
        self._untaken.append(statistics)
        self.told["batch normalisations"] += 1
        return self._noted(x, Norm(x, statistics, weight, bias)), statistics.mean, statistics.deviation

    def _add(self, func: Any, one: Any, other: Any, *, alpha: Any = 1) -> Any:
        note, added = self._note(one), other
        if note is None and func is _aten.add.Tensor:
            note, added = self._note(other), one
        if note is None or not isinstance(note.what, Norm) or note.what.added is not None or alpha != 1:
            return self._sum(func, one, other) if alpha == 1 else NotImplemented
        fitting = isinstance(added, torch.Tensor) and _alike(added, note.what.x)
        if not fitting or memory_id(added) == note.memory.cdata:
            return NotImplemented
        self._settle(added)
        what = replace(note.what, added=added)
        if func is _aten.add.Tensor:
            return self._noted(one, what)
        note.what = what
        return one

    def _sum(self, func: Any, one: Any, other: Any) -> Any:
        """Of two gradients that a ReLU's backward may take; what it takes is of the form that the ReLU gave."""
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape in self._shapes
        if torch.is_grad_enabled() or not both or not _alike(one, other) or memory_id(one) == memory_id(other):
            return NotImplemented
        self._settle((one, other))
        if func is _aten.add.Tensor:
            return self._noted(one, Sum(one, other))
        self._settle_before_writing(func, (one, other), {})
        before = one.clone() if self._poison else None  # else it stays where it is
        if self._poison:
            one.fill_(float("nan"))
        self._notes[memory_id(one)] = Note(one, Sum(before, other))
        return one

    def _relu(self, func: Any, y: Any) -> Any:
        note = self._note(y)
        if note is None or not isinstance(note.what, Norm):
            return NotImplemented
        norm = note.what
        result = y if func is _aten.relu_.default else torch.empty_like(norm.x)
        norm.write(result, relu=True)
        if result is y:
            del self._notes[memory_id(y)]
        self._rectified[memory_id(result)] = Rectified(result, norm)
        self._shapes.add(result.shape)
        self.told["with ReLU" if norm.added is None else "with addition and ReLU"] += 1
        return result

    # Backward

    def _relu_backward(self, func: Any, gradient: Any, result: Any, threshold: Any) -> Any:
        rectified = self._rectified.get(memory_id(result))
        self._settle(result)
        if rectified is None or rectified.result.expired() or threshold != 0 or not _alike(gradient, result):
            return NotImplemented
        note, one, more = self._note(gradient), gradient, None
        if note is not None and isinstance(note.what, Sum):
            one, more = gradient if note.what.one is None else note.what.one, note.what.other
        else:
            self._settle(gradient)
        self._gradients += 1
        return self._noted(gradient, Gradient(one, more, result, self._gradients))

    def _norm_backward(
        self, func: Any, gradient: Any, x: Any, weight: Any, mean: Any, variance: Any, *rest: Any
    ) -> Any:
        own_mean, deviation, training, _, mask = rest
        self._settle((x, weight, own_mean, deviation))
        if not training or not kernels.fits(x, weight, own_mean, deviation) or not _alike(gradient, x):
            return NotImplemented
        note = self._note(gradient)
        what = note.what if note is not None else None
        normal: Any = (x, own_mean, deviation, weight)
        if isinstance(what, Gradient):
            rectified, kept = self._rectified[memory_id(what.result)], None
            wanted = what.number in self._wanted_before
            if wanted or what.more is not None:  # written in passing
                kept = gradient
                self._wanted |= {what.number} if wanted else set()
                del self._notes[memory_id(gradient)]
            result = None if rectified.again(own_mean) else what.result
            found = kernels.backward(what.gradient, what.more, *normal, rectified.bias, result, True, kept)
            self.told["backward past the ReLU"] += 1
            self.told["of them of a sum"] += what.more is not None
        else:
            self._settle(gradient)
            found = kernels.backward(gradient, None, *normal, None, None, False, None)
        return tuple(one if wanted else None for one, wanted in zip(found, mask, strict=True))

    # Notes

    def _noted(self, like: torch.Tensor, what: Norm | Sum | Gradient) -> torch.Tensor:
        y = torch.empty_like(like)
        if self._poison:
            y.fill_(float("nan"))
        self._notes[memory_id(y)] = Note(y, what)
        return y

    def _note(self, tensor: Any) -> Note | None:
        """What is noted of all of a tensor."""
        note = self._notes.get(memory_id(tensor)) if has_memory(tensor) else None
        return note if note is not None and note.is_of(tensor) else None

    def _forget(self) -> None:
        """Notes of memory that nobody holds any more. Running statistics move on all the same."""
        self._notes = {number: note for number, note in self._notes.items() if not note.memory.expired()}
        if self._untaken:
            noted = [note.what.statistics for note in self._notes.values() if isinstance(note.what, Norm)]
            self._take([statistics for statistics in self._untaken if statistics not in noted])

    def _take(self, statistics: Iterable[Statistics]) -> None:
        with torch.no_grad():
            for each in statistics:
                each.take()
        self._untaken = [each for each in self._untaken if not each.taken]

    def _settle(self, values: Any) -> None:
        """Write what is only noted: somebody reads it now."""
        if self._notes:
            memories = memories_of(values)
            self._write(memories)
            self._take([each for each in self._untaken if each.memories() & memories])

    def _settle_before_writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write what is made of memory that is about to change."""
        if changed := memories_of(written_by(func, args, kwargs)):
            self._write([number for number, note in self._notes.items() if note.read() & changed])
            for rectified in self._rectified.values():
                rectified.changes(changed)

    def _write(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            note = self._notes.pop(number, None)
            if note is None:
                continue
            if isinstance(note.what, Sum) and note.what.one is None:  # what others are still to read changes
                self._write([one for one, other in self._notes.items() if number in other.read()])
            note.write()
            if isinstance(note.what, Gradient):
                self._wanted.add(note.what.number)

    def explain(self) -> str:
        """For people: what is done in one go."""
        return "in kernels of their own: " + ", ".join(f"{count} {what}" for what, count in self.told.items())


_OWN: dict[Any, Callable[..., Any]] = {
    _aten.native_batch_norm.default: FusedNorms._norm,
    _aten.add.Tensor: FusedNorms._add,
    _aten.add_.Tensor: FusedNorms._add,
    _aten.relu.default: FusedNorms._relu,
    _aten.relu_.default: FusedNorms._relu,
    _aten.threshold_backward.default: FusedNorms._relu_backward,
    _aten.native_batch_norm_backward.default: FusedNorms._norm_backward,
}


def is_clean(values: Iterable[torch.Tensor]) -> bool:
    """Whether there is no NaN in any of them; the host waits for the answer."""
    found = [value.isnan().any() for value in values if value.is_floating_point()]
    return not found or not bool(torch.stack(found).any())


def _alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    same = tensor.shape == other.shape and tensor.dtype == other.dtype and tensor.device == other.device
    return same and kernels.fits(tensor) and kernels.fits(other)
