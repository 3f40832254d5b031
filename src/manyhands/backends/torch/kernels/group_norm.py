"""GroupNorm fused with the activation that follows it, as our own PyTorch operations.

PyTorch's GroupNorm needs contiguous (channels-first) tensors, and under autocast float32. So a 16-bit image in
channels_last is cast, transposed, normalised, activated and cast again, and the next convolution transposes it back:
seven passes over memory, most of them in 32 bits. Here two passes read the image and one writes it
(``group_norm.cu``); the arithmetic is in float32 as well, and only the result is rounded:

    group_norm_statistics(x, groups, epsilon)          -> mean and rstd (one over the standard deviation) of each group
    group_norm_apply(x, mean, rstd, ...)          -> the normalised image, past the activation
    group_norm_sums(gradient, x, ...)                  -> gradients of weight and bias, and what the next needs
    group_norm_input_gradient(gradient, x, ...)        -> the gradient of x

``activation`` is ``"none"``, ``"relu"`` or ``"silu"``; with ``wide`` the result is in float32.

The kernels are for 16-bit images in channels_last on an NVIDIA GPU (:func:`fits`). On a CPU the operations are built
from PyTorch's, for tests.
"""

from __future__ import annotations

import math

import torch

from manyhands.backends.torch.kernels.batch_norm import is_by_channel, is_plain
from manyhands.backends.torch.kernels.nvrtc import Kernels, check_capability, compile_file, float_bits, multiprocessors

_FILE = "group_norm.cu"
_NUMBERS = {torch.bfloat16: "BFloat", torch.float16: "Half"}
DTYPES = tuple(_NUMBERS)
ACTIVATIONS = ("none", "relu", "silu")  # in the order of the kernels' numbers
_VECTOR = 8  # numbers that a thread reads at once
_THREADS = 256
_WIDEST = 64  # vectors of a row that a block reads at once
_ROWS = 4  # at least, for each thread
_BLOCKS = 8  # for each multiprocessor, in all samples
_MOST_PARTS = 256  # blocks of a sample, whose sums one block adds up
_MOST_CHANNELS = 4096

_library = torch.library.Library("manyhands", "FRAGMENT")
_NORMAL = "Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias"
_library.define("group_norm_statistics(Tensor x, int groups, float epsilon) -> (Tensor, Tensor)")
_library.define(f"group_norm_apply({_NORMAL}, str activation, bool wide) -> Tensor")
_library.define(f"group_norm_sums(Tensor gradient, {_NORMAL}, str activation) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"group_norm_input_gradient(Tensor gradient, {_NORMAL}, Tensor means, str activation, bool wide) -> Tensor"
)
statistics = torch.ops.manyhands.group_norm_statistics.default
apply = torch.ops.manyhands.group_norm_apply.default
sums = torch.ops.manyhands.group_norm_sums.default
input_gradient = torch.ops.manyhands.group_norm_input_gradient.default


def ready(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile the kernels if the device is a GPU; :class:`CannotCompile` says why that is not possible."""
    if device.type != "cuda":
        return
    check_capability(device)
    compile_file(_FILE, device, NUMBER=_NUMBERS[dtype])


def fits(x: torch.Tensor, *channels: torch.Tensor | None) -> bool:
    """Whether the operations accept this image and these per-channel tensors: weight and bias."""
    if x.dim() < 3 or x.dtype not in _NUMBERS or not x.numel() or not is_by_channel(x):
        return False
    if x.shape[1] % _VECTOR or x.shape[1] > _MOST_CHANNELS or x.shape[0] >= 2**16 or math.prod(x.shape[2:]) >= 2**30:
        return False
    if x.device.type == "cuda" and (x.data_ptr() % 16 or x.device.index is None):
        return False
    on_device = x.device.type in ("cpu", "cuda")
    return on_device and all(is_plain(channel, x.device) for channel in channels)


# On a GPU


def _of(x: torch.Tensor) -> Kernels:
    return compile_file(_FILE, x.device, NUMBER=_NUMBERS[x.dtype])


def _shape(x: torch.Tensor) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """Rows and vectors of a sample, the grid of blocks and the shape of one."""
    rows, vectors = math.prod(x.shape[2:]), x.shape[1] // _VECTOR
    wide = min(_WIDEST, 1 << (vectors - 1).bit_length())
    high = _THREADS // wide
    worth = -(-rows // (high * _ROWS))
    parts = -(-multiprocessors(x.device) * _BLOCKS // x.shape[0])
    return rows, vectors, (max(1, min(worth, parts, _MOST_PARTS)), x.shape[0]), (wide, high)


def _floats(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _partial(x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Memory for two sums of each channel of each block."""
    return _floats(x, grid[1], grid[0], 2, x.shape[1])


def _statistics_on_gpu(x: torch.Tensor, groups: int, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vectors, grid, block = _shape(x)
    partial, mean, rstd = _partial(x, grid), _floats(x, len(x), groups), _floats(x, len(x), groups)
    kernels = _of(x)
    kernels.launch("sums", grid, block, x, partial, rows, vectors)
    numbers = (grid[0], rows, vectors, groups, float_bits(epsilon))
    kernels.launch("statistics", (1, len(x)), (_THREADS, 1), x, partial, mean, rstd, *numbers)
    return mean, rstd


def _apply_on_gpu(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    wide: bool,
) -> torch.Tensor:
    rows, vectors, grid, block = _shape(x)
    y = torch.empty_like(x, dtype=torch.float32 if wide else x.dtype)
    numbers = (ACTIVATIONS.index(activation), int(wide), rows, vectors, mean.shape[1])
    _of(x).launch("apply", grid, block, y, x, mean, rstd, weight, bias, *numbers)
    return y


def _sums_on_gpu(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, vectors, grid, block = _shape(x)
    groups, kernels = mean.shape[1], _of(x)
    partial, of_samples, means = _partial(x, grid), _floats(x, len(x), 2, x.shape[1]), _floats(x, len(x), groups, 2)
    numbers = (ACTIVATIONS.index(activation), rows, vectors, groups)
    kernels.launch("gradient_sums", grid, block, gradient, x, mean, rstd, weight, bias, partial, *numbers)
    sizes = (grid[0], rows, vectors, groups)
    kernels.launch("coefficients", (1, len(x)), (_THREADS, 1), partial, weight, of_samples, means, *sizes)
    return of_samples[:, 1].sum(0), of_samples[:, 0].sum(0), means


def _input_gradient_on_gpu(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    means: torch.Tensor,
    activation: str,
    wide: bool,
) -> torch.Tensor:
    rows, vectors, grid, block = _shape(x)
    result = torch.empty_like(x, dtype=torch.float32 if wide else x.dtype)
    normal = (x, mean, rstd, weight, bias, means)
    numbers = (ACTIVATIONS.index(activation), int(wide), rows, vectors, mean.shape[1])
    _of(x).launch("input_gradient", grid, block, result, gradient, *normal, *numbers)
    return result


# On a CPU, with PyTorch's operations


def _statistics(x: torch.Tensor, groups: int, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    grouped = x.float().reshape(len(x), groups, -1)
    variance, mean = torch.var_mean(grouped, -1, correction=0)
    return mean, (variance + epsilon).rsqrt()


def _by_channel(numbers: torch.Tensor | None, x: torch.Tensor, otherwise: float) -> torch.Tensor:
    """One number per channel, or per group of each sample, in a shape that broadcasts with the image."""
    if numbers is None:
        return torch.full((), otherwise)
    if numbers.dim() == 2:
        numbers = numbers.repeat_interleave(x.shape[1] // numbers.shape[1], 1)
    return numbers.reshape(*([1] if numbers.dim() == 1 else []), *numbers.shape, *[1] * (x.dim() - 2))


def _normal(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    return (x.float() - _by_channel(mean, x, 0.0)) * _by_channel(rstd, x, 1.0)


def _apply(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    wide: bool,
) -> torch.Tensor:
    y = _normal(x, mean, rstd) * _by_channel(weight, x, 1.0) + _by_channel(bias, x, 0.0)
    if activation != "none":
        y = y.relu() if activation == "relu" else torch.nn.functional.silu(y)
    return y if wide else y.to(x.dtype)


def _before_activation(gradient: torch.Tensor, y: torch.Tensor, activation: str) -> torch.Tensor:
    """The gradient before the activation, from the gradient after it."""
    gradient = gradient.float()
    if activation == "relu":
        return gradient * (y > 0)
    s = y.sigmoid()
    return gradient if activation == "none" else gradient * s * (1 + y * (1 - s))


def _sums(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradient = _before_activation(gradient, _apply(x, mean, rstd, weight, bias, "none", True), activation)
    plain = gradient.flatten(2).sum(2)
    product = (gradient * _normal(x, mean, rstd)).flatten(2).sum(2)
    by = torch.ones(x.shape[1]) if weight is None else weight
    grouped = [(each * by).reshape(len(x), mean.shape[1], -1).sum(-1) for each in (plain, product)]
    means = torch.stack(grouped, -1) / (x[0].numel() // mean.shape[1])
    return product.sum(0), plain.sum(0), means


def _input_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    means: torch.Tensor,
    activation: str,
    wide: bool,
) -> torch.Tensor:
    gradient = _before_activation(gradient, _apply(x, mean, rstd, weight, bias, "none", True), activation)
    plain, product = (_by_channel(each, x, 0.0) for each in means.unbind(-1))
    inner = gradient * _by_channel(weight, x, 1.0) - plain - _normal(x, mean, rstd) * product
    result = inner * _by_channel(rstd, x, 1.0)
    return result if wide else result.to(x.dtype)


for _name, _here, _on_gpu in (
    ("group_norm_statistics", _statistics, _statistics_on_gpu),
    ("group_norm_apply", _apply, _apply_on_gpu),
    ("group_norm_sums", _sums, _sums_on_gpu),
    ("group_norm_input_gradient", _input_gradient, _input_gradient_on_gpu),
):
    _library.impl(_name, _here, "CPU")
    _library.impl(_name, _on_gpu, "CUDA")
