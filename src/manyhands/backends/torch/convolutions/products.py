"""Computes a convolution as one matrix product.

A 1x1 convolution is the product of pixels x channels with channels x channels; a strided one first selects every
``stride``-th pixel. A convolution with few channels, as the first of a net, wastes most of a tensor core; a product
over patches (the neighbourhood of each pixel as one row) does not. The rows are padded to a multiple of eight numbers.
On a GPU our own kernel writes patches, and selects the pixels of a strided convolution.
"""

from __future__ import annotations

import functools

import torch

from manyhands.backends.torch.convolutions.problems import Form, Kind, Problem
from manyhands.backends.torch.kernels.nvrtc import compiled
from manyhands.errors import CannotCompile

_FILE = "patches.cu"
_PAD = 8
_FEW = 4  # channels, at most, for a product over patches
_LONGEST = 256  # numbers in a patch
_THREADS = 256
_MOST_BLOCKS = 1 << 20


class Product:
    """A way to solve problems of 1x1 convolutions, and of those with few input channels."""

    name = "product"
    is_cleared_ahead = False

    def __init__(self, problem: Problem, result: Form) -> None:
        self._problem, self._result = problem, result

    def data(self) -> list[object]:
        """What is stored of this way."""
        return [self.name]

    def __call__(self, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        kind = self._problem.kind
        if kind is Kind.FORWARD:
            return self._forward(first, second, bias)
        return self._input_gradient(first, second) if kind is Kind.INPUT_GRADIENT else self._weight(first, second)

    def _forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = self._rows(x, self._result.shape[2:])
        filters = _padded(_filters(weight), rows.shape[1]).t()
        product = rows @ filters if bias is None else torch.addmm(bias, rows, filters)  # one kernel for both
        return self._as_result(_image(product, self._result.shape))

    def _input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The input's gradient of a 1x1 convolution: it is zero for pixels that the stride skips."""
        down, across = self._problem.stride
        rows = _image(_pixels(gradient) @ _filters(weight), (gradient.shape[0], weight.shape[1], *gradient.shape[2:]))
        if (down, across) == (1, 1):
            return self._as_result(rows)
        result = self._empty(rows).zero_()
        result[:, :, ::down, ::across] = rows
        return result

    def _weight(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        channels, taken, high, wide = self._result.shape
        rows = self._rows(x, gradient.shape[2:])
        product = (_pixels(gradient).t() @ rows)[:, : taken * high * wide]
        return self._as_result(product.reshape(channels, high, wide, taken).permute(0, 3, 1, 2))

    def _rows(self, x: torch.Tensor, pixels: tuple[int, ...]) -> torch.Tensor:
        """One row for each pixel of the result: the inputs that it is computed from."""
        if self._problem.kernel == (1, 1):
            down, across = self._problem.stride
            if (down, across) == (1, 1) or x.shape[1] % _PAD or not _has_patches(x.device):
                return _pixels(x[:, :, ::down, ::across])
        return patches(x, self._problem, pixels)

    def _as_result(self, tensor: torch.Tensor) -> torch.Tensor:
        if Form.of(tensor) == self._result:
            return tensor
        return self._empty(tensor).copy_(tensor)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(self._result.shape, self._result.stride, dtype=like.dtype, device=like.device)


def candidates(problem: Problem, result: Form) -> list[Product]:
    """The product, if the problem can be computed as one."""
    if problem.groups != 1:
        return []
    if problem.kernel == (1, 1):
        if problem.stride != (1, 1):
            _has_patches(problem.device)  # loads the kernel now: it cannot be loaded during a capture
        return [Product(problem, result)] if not any(problem.padding) else []
    image = problem.second if problem.kind is Kind.WEIGHT_GRADIENT else problem.first
    high, wide = problem.kernel
    if problem.kind is Kind.INPUT_GRADIENT or image.shape[1] > _FEW or image.shape[1] * high * wide > _LONGEST:
        return []
    if problem.device.type == "cuda" and not _has_patches(problem.device):
        return []
    return [Product(problem, result)]


@functools.cache
def _has_patches(device: torch.device) -> bool:
    """Whether our own kernel can be used."""
    if device.type != "cuda":
        return False
    try:
        compiled(_FILE, device)
    except CannotCompile:
        return False
    return True


def patches(x: torch.Tensor, problem: Problem, pixels: tuple[int, ...]) -> torch.Tensor:
    """The neighbourhoods of all pixels: one row each, channels innermost, padded with zeros."""
    (high, wide), channels = problem.kernel, x.shape[1]
    length = channels * high * wide
    padded = -(-length // _PAD) * _PAD
    if x.device.type != "cuda":
        columns = torch.nn.functional.unfold(x, (high, wide), problem.dilation, problem.padding, problem.stride)
        rows = columns.view(x.shape[0], channels, high * wide, -1).permute(0, 3, 2, 1).reshape(-1, length)
        return _padded(rows, padded)
    rows = torch.empty(x.shape[0] * pixels[0] * pixels[1], padded, dtype=x.dtype, device=x.device)
    vectors = rows.numel() // _PAD
    sizes = (*x.shape[1:], *x.stride(), *pixels, wide, *problem.stride, *problem.padding, *problem.dilation)
    grid = min(-(-vectors // _THREADS), _MOST_BLOCKS), 1
    compiled(_FILE, x.device).launch("patches", grid, (_THREADS, 1), rows, x, vectors, padded // _PAD, length, *sizes)
    return rows


def _pixels(tensor: torch.Tensor) -> torch.Tensor:
    """A row for each pixel."""
    return tensor.permute(0, 2, 3, 1).reshape(-1, tensor.shape[1])


def _filters(weight: torch.Tensor) -> torch.Tensor:
    """A row for each output channel, in the order of patches."""
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def _image(rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows of pixels as an image with channels last."""
    number, channels, high, wide = shape
    return rows.view(number, high, wide, channels).permute(0, 3, 1, 2)


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    return rows if rows.shape[1] == length else torch.nn.functional.pad(rows, (0, length - rows.shape[1]))
