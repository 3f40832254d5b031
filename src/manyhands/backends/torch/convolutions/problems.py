"""A convolution, or one of its gradients, as a key: shapes, strides, dtype, device and settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

HALVES = (torch.bfloat16, torch.float16)
ALIGNED = 16  # bytes: the alignment of tensors that ways accept


class Kind(Enum):
    """One of the three products of a convolutional layer."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


@dataclass(frozen=True, slots=True)
class Form:
    """Shape and strides of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tuple(tensor.stride()))


@dataclass(frozen=True, slots=True)
class Problem:
    """A convolution in two dimensions, or one of its gradients.

    ``first`` and ``second`` are the operands: image and weight for the forward pass, output gradient and weight for the
    input's gradient, output gradient and image for the weight's. ``shape`` is the shape of the result, if the operands
    do not determine it.
    """

    kind: Kind
    first: Form
    second: Form
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    has_bias: bool = False  # forward only

    @property
    def key(self) -> str:
        """Equal for equal problems, in other processes too."""
        forms = (self.first.shape, self.first.stride, self.second.shape, self.second.stride, self.shape)
        how = (self.stride, self.padding, self.dilation, self.groups)
        kind = self.kind.value + " with bias" * self.has_bias
        return f"{kind} {str(self.dtype).removeprefix('torch.')} {forms} {how}".replace("), (", ")(")

    @property
    def work(self) -> tuple[float, float]:
        """Multiplications and additions, and the minimum number of bytes to move."""
        image, weight, output = self._shapes()
        pixels = output[0] * output[2] * output[3]
        numbers = sum(map(math.prod, (image, weight, output)))
        return 2.0 * pixels * math.prod(weight), float(numbers * self.dtype.itemsize)

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The shapes of image, weight and output."""
        if self.kind is Kind.INPUT_GRADIENT:
            return self.shape, self.second.shape, self.first.shape
        if self.kind is Kind.WEIGHT_GRADIENT:
            return self.second.shape, self.shape, self.first.shape
        (number, _, *sizes), (channels, _, *kernel) = self.first.shape, self.second.shape
        how = zip(sizes, kernel, self.stride, self.padding, self.dilation, strict=True)
        pixels = ((size + 2 * pad - wide * (width - 1) - 1) // step + 1 for size, width, step, pad, wide in how)
        return self.first.shape, self.second.shape, (number, channels, *pixels)

    @property
    def kernel(self) -> tuple[int, ...]:
        """Height and width of the weight."""
        return (self.shape if self.kind is Kind.WEIGHT_GRADIENT else self.second.shape)[2:]


def problem(
    kind: Kind,
    first: torch.Tensor,
    second: torch.Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    has_bias: bool = False,
) -> Problem | None:
    """The problem of these tensors; None if only PyTorch's way is used."""
    if first.dim() != 4 or second.dim() != 4 or first.dtype is not second.dtype or not first.numel():
        return None
    if first.dtype not in HALVES and first.device.type != "cpu":
        return None  # in 32 bits ways differ by more than the order of sums
    if layout(first, second) is None:
        return None
    how = _pair(stride), _pair(padding), _pair(dilation), groups, has_bias
    return Problem(kind, Form.of(first), Form.of(second), tuple(shape), first.dtype, _numbered(first.device), *how)


def is_aligned(*tensors: torch.Tensor) -> bool:
    return all(tensor.data_ptr() % ALIGNED == 0 for tensor in tensors)


def _numbered(device: torch.device) -> torch.device:
    return device if device.type == "cpu" or device.index is not None else torch.device(device.type, 0)


def _pair(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(numbers) * 2 if len(numbers) == 1 else tuple(numbers)


def layout(first: torch.Tensor, second: torch.Tensor) -> torch.memory_format | None:
    """The memory format in which both are dense: channels last or channels first; None if there is none."""
    formats = (torch.channels_last, torch.contiguous_format)
    both = (
        format for format in formats if all(tensor.is_contiguous(memory_format=format) for tensor in (first, second))
    )
    return next(both, None)
