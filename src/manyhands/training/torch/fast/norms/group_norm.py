"""GroupNorm fused with the casts around it and the activation after it; the model does not change.

Under autocast PyTorch computes GroupNorm in float32 and not in channels_last. A dispatch mode defers the operations
between two convolutions, as :mod:`.batch_norm` does for BatchNorm: it allocates each result without writing it, and
notes what belongs there. Between two 16-bit convolutions, no 32-bit result has to be written at all:

    x = conv(...)           16 bits, channels_last
    x32 = cast(x)           note: x32 is x, in 32 bits
    y32 = group_norm(x32)   a kernel computes the statistics of x; note: y32 is normalised x
    z32 = silu(y32)         note: z32 is silu(normalised x)
    z = cast(z32)           a kernel writes z, in 16 bits and channels_last

The backward pass works in the same way, from the gradient of ``z`` to that of ``x``. Before any other operation reads
an unwritten result, the mode writes it. ``z`` is in channels_last, but PyTorch's ``z`` is not: if a model takes a
``view`` that only PyTorch's ``z`` allows, the first step raises and the job continues without these kernels.

The tensors that autograd saves for the backward pass (``x32`` and ``y32``) stay unwritten until the backward pass frees
them. If one is still alive after that, something else holds it, so it is written then. A mode cannot see reads that
bypass PyTorch. So the first step fills unwritten memory with NaN, and if NaN reaches the loss, a gradient or a buffer,
the job continues without these kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from manyhands.backends.torch.compat import memory_id
from manyhands.backends.torch.kernels import group_norm as kernels
from manyhands.training.torch.fast.norms.pending import DeferringMode
from manyhands.training.torch.fast.operations import has_memory, is_cast_of_weight_gradient

_aten = torch.ops.aten


@dataclass
class Widened:
    """A 16-bit image or gradient, in float32."""

    x: torch.Tensor

    def write(self, y: torch.Tensor) -> None:
        y.copy_(self.x)

    def read(self) -> list[torch.Tensor | None]:
        return [self.x]


@dataclass
class Normalised:
    """An image after a GroupNorm and an activation, in float32."""

    x: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    activation: str = "none"

    def parts(self) -> tuple[torch.Tensor | None, ...]:
        return self.x, self.mean, self.rstd, self.weight, self.bias

    @property
    def narrow_dtype(self) -> torch.dtype:
        return self.x.dtype

    def narrow(self) -> torch.Tensor:
        """In 16 bits."""
        result: torch.Tensor = kernels.apply(*self.parts(), self.activation, False)
        return result

    def write(self, y: torch.Tensor) -> None:
        y.copy_(kernels.apply(*self.parts(), self.activation, True))

    def read(self) -> list[torch.Tensor | None]:
        return list(self.parts())


@dataclass
class ActivationGradient:
    """The gradient of a GroupNorm's result, in float32; ``gradient`` is that of the activation's result, in 16 bits."""

    gradient: torch.Tensor
    norm: Normalised

    def write(self, y: torch.Tensor) -> None:
        gradient = self.gradient.float()
        before = kernels.apply(*self.norm.parts(), "none", True)
        if self.norm.activation == "relu":
            y.copy_(_aten.threshold_backward(gradient, before, 0))
        else:
            y.copy_(_aten.silu_backward(gradient, before))

    def read(self) -> list[torch.Tensor | None]:
        return [self.gradient, *self.norm.parts()]


@dataclass
class InputGradient:
    """The gradient of a GroupNorm's input, in float32."""

    gradient: torch.Tensor
    norm: Normalised
    means: torch.Tensor

    @property
    def narrow_dtype(self) -> torch.dtype:
        return self.gradient.dtype

    def _compute(self, wide: bool) -> torch.Tensor:
        parts = (*self.norm.parts(), self.means, self.norm.activation)
        result: torch.Tensor = kernels.input_gradient(self.gradient, *parts, wide)
        return result

    def narrow(self) -> torch.Tensor:
        """In 16 bits."""
        return self._compute(False)

    def write(self, y: torch.Tensor) -> None:
        y.copy_(self._compute(True))

    def read(self) -> list[torch.Tensor | None]:
        return [self.gradient, *self.norm.parts(), self.means]


class FusedGroupNorms(DeferringMode):
    """Use it around the forward pass and then around the backward pass, as the innermost mode.

    The usage is that of :class:`.batch_norm.FusedBatchNorms`. Only autograd may read results between the passes.
    """

    def __init__(self) -> None:
        super().__init__(_HANDLERS, "group normalisation")
        self.begin(poison=False)

    def begin(self, *, poison: bool) -> None:
        """Begin a step. ``poison``: fill unwritten memory with NaN, to detect reads of it."""
        self._poison, self._passes = poison, 0
        self._notes = {}
        self.counts = Counter[str]()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        self._forget()
        self._passes += 1
        # Between the passes only autograd reads results. Those still alive after them are held by something else.
        # After an error the step is repeated, and the model may read results that it holds.
        if self._passes > 1 or kind is not None:
            with nullcontext() if kind is None else suppress(Exception):
                self._write(list(self._notes))
            self._notes = {}

    # Casts and copies

    def _cast(self, func: Any, x: Any, **options: Any) -> Any:
        pending, dtype = self._pending_of(x), options.pop("dtype", None)
        usual = {"layout": torch.strided, "device": x.device, "memory_format": torch.preserve_format}
        if any(value not in (None, False, usual.get(name)) for name, value in options.items()):
            return NotImplemented
        if pending is None and dtype is torch.float32 and _may_be_image(x) and not is_cast_of_weight_gradient():
            return self._defer(torch.empty_like(x, dtype=dtype), Widened(x))
        if isinstance(pending, (Normalised, InputGradient)) and dtype is pending.narrow_dtype:
            return pending.narrow()
        return NotImplemented

    def _clone(self, func: Any, x: Any, *, memory_format: Any = None) -> Any:
        """Defer the copy of a pending result, too."""
        pending = self._pending_of(x)
        if pending is None:
            return NotImplemented
        return self._defer(torch.empty_like(x, memory_format=memory_format or torch.preserve_format), pending)

    # Forward

    def _norm(self, func: Any, x: Any, weight: Any, bias: Any, *sizes: int) -> Any:
        self._settle((weight, bias))
        pending, (*_, groups) = self._pending_of(x), sizes[:-1]
        if not isinstance(pending, Widened) or not kernels.fits(pending.x, weight, bias):
            return NotImplemented
        mean, rstd = kernels.statistics(pending.x, groups, sizes[-1])
        self.counts["group normalisations"] += 1
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._defer(y, Normalised(pending.x, mean, rstd, weight, bias)), mean, rstd

    def _activate(self, func: Any, y: Any) -> Any:
        pending = self._pending_of(y)
        if not isinstance(pending, Normalised) or pending.activation != "none":
            return NotImplemented
        activation = _ACTIVATIONS[func]
        pending = replace(pending, activation=activation)
        self.counts[f"with {_NAMES[activation]}"] += 1
        if func in _IN_PLACE:
            self._notes[memory_id(y)].pending = pending
            return y
        return self._defer(torch.empty_like(y), pending)

    # Backward

    def _activation_backward(self, func: Any, gradient: Any, saved: Any, threshold: Any = 0) -> Any:
        """``saved``: the input of a SiLU, or the result of a ReLU."""
        outer, norm = self._pending_of(gradient), self._pending_of(saved)
        activation, before = ("silu", "none") if func is _aten.silu_backward.default else ("relu", "relu")
        if not isinstance(outer, Widened) or not isinstance(norm, Normalised) or norm.activation != before:
            return NotImplemented
        if threshold != 0 or not _are_alike(outer.x, norm.x):
            return NotImplemented
        return self._defer(
            torch.empty_like(gradient), ActivationGradient(outer.x, replace(norm, activation=activation))
        )

    def _norm_backward(
        self, func: Any, gradient: Any, x: Any, mean: Any, rstd: Any, weight: Any, *sizes_and_mask: Any
    ) -> Any:
        self._settle((mean, rstd, weight))
        outer, image, mask = self._pending_of(gradient), self._pending_of(x), sizes_and_mask[-1]
        if not isinstance(image, Widened) or not kernels.fits(image.x, weight):
            return NotImplemented
        if isinstance(outer, ActivationGradient) and memory_id(outer.norm.mean) == memory_id(mean):
            behind, norm = outer.gradient, outer.norm
        elif isinstance(outer, Widened) and _are_alike(outer.x, image.x):
            behind, norm = outer.x, Normalised(image.x, mean, rstd, weight, None)
        else:
            return NotImplemented
        if behind.stride() != image.x.stride() or not kernels.fits(behind):
            behind = torch.empty_like(image.x).copy_(behind)
        for_weight, for_bias, means = kernels.sums(behind, *norm.parts(), norm.activation)
        for_x = self._defer(torch.empty_like(x), InputGradient(behind, norm, means)) if mask[0] else None
        self.counts["backward"] += 1
        return for_x, for_weight if mask[1] else None, for_bias if mask[2] else None

    # Notes

    def _pending_of(self, tensor: Any) -> Any:
        """The pending result in a tensor's memory, unless the tensor is another view of it."""
        note = self._note(tensor)
        return None if note is None else note.pending


_ACTIVATIONS = {
    _aten.relu.default: "relu",
    _aten.relu_.default: "relu",
    _aten.silu.default: "silu",
    _aten.silu_.default: "silu",
}
_IN_PLACE = {_aten.relu_.default, _aten.silu_.default}
_NAMES = {"relu": "ReLU", "silu": "SiLU"}
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten._to_copy.default: FusedGroupNorms._cast,
    _aten.clone.default: FusedGroupNorms._clone,
    _aten.native_group_norm.default: FusedGroupNorms._norm,
    **dict.fromkeys(_ACTIVATIONS, FusedGroupNorms._activate),
    _aten.silu_backward.default: FusedGroupNorms._activation_backward,
    _aten.threshold_backward.default: FusedGroupNorms._activation_backward,
    _aten.native_group_norm_backward.default: FusedGroupNorms._norm_backward,
}


def _may_be_image(x: torch.Tensor) -> bool:
    plain = type(x) is torch.Tensor and has_memory(x) and x.device.type in ("cpu", "cuda")
    return plain and x.dim() > 2 and x.dtype in kernels.DTYPES


def _are_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype and tensor.device == other.device
