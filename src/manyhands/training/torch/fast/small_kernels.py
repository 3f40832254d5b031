"""One kernel for all casts of weights, and one for all counters of BatchNorm layers.

Autocast casts each weight when a layer reads it, and each BatchNorm counts its batches: some hundred tiny kernels in a
step. From the second pass on, a dispatch mode casts all weights of the pass before at the beginning, and counts at the
end::

    pass 1   cast w1 ... count 1 ... cast w2 ... count 2
    pass 2   cast w1, w2 together ... count 1, 2 together

The results are equal to the bit. A weight that has been written to since its early cast is cast again.
"""

from __future__ import annotations

from typing import Any

import torch

from manyhands.amounts import count_of
from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import TorchDispatchMode
from manyhands.training.torch.fast.extension import Extension

_aten = torch.ops.aten


class SmallKernels(Extension, TorchDispatchMode):
    """The mode, around each forward pass of a model that is warmed up and captured."""

    is_mode = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        norms = [layer for layer in model.modules() if isinstance(layer, compat.BatchNorm)]
        # A layer without momentum reads its counter.
        self._counters = {id(norm.num_batches_tracked) for norm in norms if norm.momentum is not None}
        self._weights: dict[int, tuple[torch.nn.Parameter, torch.dtype]] = {}  # cast in the pass before
        self._begin()

    def _begin(self) -> None:
        self._now: dict[int, tuple[torch.nn.Parameter, torch.dtype]] = {}
        self._early: dict[int, tuple[int, torch.Tensor]] = {}  # the weight's version, and its cast
        self._counted: dict[int, torch.Tensor] = {}
        self._casts = self._counts = 0

    def forward(self, *_: Any) -> SmallKernels:
        return self

    def __enter__(self) -> SmallKernels:
        self._begin()
        if weights := [weight.detach() for weight, _ in self._weights.values()]:
            casts = [
                torch.empty_like(weight, dtype=dtype)
                for weight, (_, dtype) in zip(weights, self._weights.values(), strict=True)
            ]
            compat.foreach_copy_(casts, weights)
            pairs = zip(self._weights.items(), casts, strict=True)
            self._early = {key: (compat.write_count(weight), cast) for (key, (weight, _)), cast in pairs}
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        self._count()
        self._weights, self._early = self._now, {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._to_copy.default and _is_cast_of_weight(args, kwargs):
            return self._cast(func, args[0], kwargs["dtype"])
        if func is _aten.add_.Tensor and id(args[0]) in self._counters and args[1:] == (1,):
            if id(args[0]) in self._counted:  # a layer that is called again
                self._count()
            self._counted[id(args[0])] = args[0]
            return args[0]
        return func(*args, **kwargs)

    def _count(self) -> None:
        if self._counted:
            compat.foreach_add_(list(self._counted.values()), 1)
        self._counts += len(self._counted)
        self._counted = {}

    def _cast(self, func: Any, weight: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        self._now[id(weight)] = weight, dtype
        version, early = self._early.pop(id(weight), (-1, None))
        if early is None or early.dtype is not dtype or version != compat.write_count(weight):
            return func(weight, dtype=dtype)  # type: ignore[no-any-return]
        self._casts += 1
        return early

    def explain(self, *_: Any) -> str | None:
        kinds = {"cast of weights": self._casts, "count of batches": self._counts}
        done = [count_of(count, kind, kind.replace(" of", "s of", 1)) for kind, count in kinds.items() if count]
        return f"in one kernel each: {', '.join(done)}" if done else None


def _is_cast_of_weight(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is a cast by autocast of a parameter; another tensor may be a new one in the next step."""
    plain = len(args) == 1 and set(kwargs) == {"dtype"} and isinstance(args[0], torch.nn.Parameter)
    return plain and args[0].layout is torch.strided and kwargs["dtype"] is not args[0].dtype
