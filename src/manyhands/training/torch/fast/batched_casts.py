"""One kernel for all casts of weights, and one for all BatchNorm counters.

A dispatch mode batches them in a running step:

    step n        cast w1 ... cast w2 ... cast w3          (remembered)
    step n + 1    cast w1, w2, w3 in one kernel when w1 is needed; w2 and w3 are then ready

    count += 1    deferred until something reads the counter, or the pass ends

The casts depend on nothing else in the pass. If there are side lanes (:mod:`.lanes.lanes`), one of them starts the
casts at the beginning of the pass, in parallel with the gather of the batch; the main lane waits when it needs w1.

The results are equal to the bit. If something writes to a weight after its early cast, the weight is cast again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from manyhands.amounts import counted
from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import TorchDispatchMode, memory_id
from manyhands.training.torch.fast.capture_stream import current_stream
from manyhands.training.torch.fast.extension import Extension, SizedStep
from manyhands.training.torch.fast.lanes.lanes import ForkedWork
from manyhands.training.torch.fast.operations import is_view, memories_of, written_by

_aten = torch.ops.aten

_SINGULAR = {"casts of weights": "cast of weights", "counts of batches": "count of batches"}


class Casts(Extension):
    """The extension of a captured step, around each forward pass."""

    is_mode = True

    def __init__(self) -> None:
        self._mode = BatchedCasts()

    def forward(self, sized: SizedStep) -> BatchedCasts:
        self._mode.forked = None if sized.lanes is None else sized.lanes.forked
        return self._mode

    def explain(self, sized: SizedStep) -> str | None:
        return self._mode.explain() if self._mode.counts else None


class BatchedCasts(TorchDispatchMode):
    """Use the same instance around each forward pass: ``with batched_casts: loss = loss_of(model)``.

    ``forked``: a side lane that later passes may use.
    """

    def __init__(self, forked: ForkedWork | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forked = forked
        self._before: dict[int, tuple[torch.Tensor, torch.dtype]] = {}  # the casts of the previous pass, by memory
        self._now: dict[int, tuple[torch.Tensor, torch.dtype]] = {}
        self._ahead: dict[int, torch.Tensor] | None = None  # cast, and not yet requested
        self._batch_counts: dict[int, torch.Tensor] = {}
        self._is_early = False  # whether the casts of this pass run on the side lane
        self._stream: torch.cuda.Stream | None = None  # the stream of the pass: early casts are ready on it
        self.counts = Counter[str]()

    def __enter__(self) -> BatchedCasts:
        self._now, self._ahead, self._batch_counts = {}, None, {}
        self.counts = Counter[str]()
        self._is_early = False
        self._stream = current_stream()
        if self.forked is not None and self._before:
            first, dtype = next(iter(self._before.values()))
            self._ahead = self._all_casts(first.device, dtype, self.forked) or None
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        if self.forked is not None:
            self.forked.join()
        if kind is None:
            self._count()
        self._before, self._ahead, self._batch_counts = self._now, None, {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._to_copy.default and _is_cast_of_weight(args, kwargs):
            return self._cast(func, args[0], kwargs["dtype"])
        if func is _aten.add_.Tensor and not kwargs and _is_count(*args):
            if memory_id(args[0]) in self._batch_counts:
                self._count()
            self._batch_counts[memory_id(args[0])] = args[0]
            return args[0]
        if self._batch_counts and not is_view(func) and self._batch_counts.keys() & memories_of((args, kwargs)):
            self._count()
        if self._ahead or (self.forked is not None and self.forked.is_running):
            self._before_writing(func, args, kwargs)
        return func(*args, **kwargs)

    def _before_writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop the early casts of weights that this operation writes to, once the side lane has read the weights."""
        written, ahead = memories_of(written_by(func, args, kwargs)), self._ahead or {}
        if self.forked is not None and self.forked.is_running:
            if ahead.keys() & written:
                self.forked.join()
            self.forked.note(str(func), memories_of((args, kwargs)), written)
        for changed in written:
            ahead.pop(changed, None)

    def _cast(self, func: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        number = memory_id(weight)
        self._now[number] = weight, dtype
        if current_stream() != self._stream:  # a stream that the model uses
            return func(weight, dtype=dtype)  # type: ignore[no-any-return]
        if self._ahead is None:
            self._ahead = self._all_casts(weight.device, dtype, None)
        elif self.forked is not None:
            self.forked.join()
        ready = self._ahead.pop(number, None)
        if ready is None or self._before[number][0] is not weight or ready.dtype is not dtype:
            return func(weight, dtype=dtype)  # type: ignore[no-any-return]
        return ready

    def _all_casts(
        self, device: torch.device, dtype: torch.dtype, forked: ForkedWork | None
    ) -> dict[int, torch.Tensor]:
        weights_by_memory = {
            number: weight
            for number, (weight, into) in self._before.items()
            if into is dtype and weight.device == device and memory_id(weight) == number
        }
        if not weights_by_memory:
            return {}
        weights = [weight.detach() for weight in weights_by_memory.values()]
        casts = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        if forked is None:
            compat.foreach_copy_(casts, weights)
        else:
            forked.begin(lambda: compat.foreach_copy_(casts, weights), reads=weights, writes=casts)
            self._is_early = True
        self.counts["casts of weights"] = len(casts)
        return dict(zip(weights_by_memory, casts, strict=True))

    def _count(self) -> None:
        if self._batch_counts:
            compat.foreach_add_(list(self._batch_counts.values()), 1)
            self.counts["counts of batches"] += len(self._batch_counts)
        self._batch_counts = {}

    def explain(self) -> str:
        """What was batched, in words."""
        batched = "batched: " + ", ".join(counted(count, _SINGULAR[kind], kind) for kind, count in self.counts.items())
        return batched + "; the casts on a side lane, from the step's beginning" * self._is_early


def _is_cast_of_weight(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is a cast by autocast of a parameter; another tensor may be a new one in the next step."""
    plain = len(args) == 1 and set(kwargs) == {"dtype"} and isinstance(args[0], torch.nn.Parameter)
    return plain and args[0].layout is torch.strided and kwargs["dtype"] is not args[0].dtype


def _is_count(count: Any, added: Any) -> bool:
    """Whether this operation increments a BatchNorm's counter: a scalar integer plus one."""
    return type(added) is int and added == 1 and count.dtype is torch.int64 and count.dim() == 0
