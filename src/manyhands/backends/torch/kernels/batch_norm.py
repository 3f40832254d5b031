"""BatchNorm fused with the addition and the ReLU that follow it, as our own PyTorch operations.

PyTorch runs ``relu(batch_norm(x) + shortcut)`` as four kernels, each of which reads the whole layer and three of which
write it: statistics, normalisation, addition, ReLU; and as three more backward. The GPU computes almost nothing in
them; it waits for memory. Here it is one kernel forward and two backward (``batch_norm.cu``), and intermediate results
are not written:

    batch_norm_forward_(y, mean, rstd, x, ...)        mean, 1 / standard deviation (rstd) and y as below, in one kernel;
                                                         running statistics move on. Without y: the statistics alone
    batch_norm_apply_(y, x, ..., added, relu=True)    y = relu(normalised x + added)
    batch_norm_backward(gradient, more, x, ...)       -> gradients of x, weight and bias, past the ReLU, of a
                                                         gradient that is the sum of two, if there is more
    batch_norm_reduce_(masked_gradient, ...)          -> the first half of it, gradients of weight and bias, where
                                                         others need what the ReLU let through (masked_gradient) sooner
    batch_norm_input_gradient(masked_gradient, x, ...) -> the second half

The single forward kernel gives the results of the two, to the bit. All of its blocks have to run at the same time.
Backward, two kernels are better: weight gradients run beside them, and a kernel that waits until it has the whole GPU
slows these down by as much as it gains. So the second kernel starts early, while the first one ends.

The kernels are for channels_last tensors on an NVIDIA GPU (:func:`fits`). Elsewhere the same operations are built from
PyTorch's (:mod:`.batch_norm_reference`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from manyhands.backends.torch.kernels import batch_norm_reference as reference
from manyhands.backends.torch.kernels.nvrtc import (
    Kernels,
    Launch,
    check_capability,
    compile_file,
    float_bits,
    multiprocessors,
)

_FILE = "batch_norm.cu"
_NUMBERS = {torch.bfloat16: "BFloat", torch.float16: "Half", torch.float32: "Float"}
_VECTOR = 16  # bytes that a thread reads at once
_WIDEST = 32  # vectors of a row that a block reads
_WIDE = {"sums": 8, "numbers": 32}  # preferred; sums of few columns are quickly added up over blocks
_THREADS = {"sums": 512, "numbers": 128}
_BLOCKS = {"sums": 1, "numbers": 4}  # for each multiprocessor
_ROWS = {"sums": 4, "numbers": 4}  # at least, for each thread
_MOST_COLUMNS = 64  # of blocks: 16,384 channels in bfloat16
_TICKETS = 4096 * _MOST_COLUMNS

_library = torch.library.Library("manyhands", "FRAGMENT")
_library.define(
    "batch_norm_apply_(Tensor(a!) y, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "Tensor? added, bool relu) -> ()"
)
_library.define(
    "batch_norm_forward_(Tensor(a!)? y, Tensor(b!) mean, Tensor(c!) rstd, Tensor x, Tensor(d!)? running_mean, "
    "Tensor(e!)? running_variance, float momentum, float epsilon, Tensor? weight, Tensor? bias, Tensor? added, "
    "bool relu) -> ()"
)
_library.define(
    "batch_norm_backward(Tensor gradient, Tensor? more, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor? bias, Tensor? result, bool relu, Tensor(a!)? masked_gradient) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "batch_norm_reduce_(Tensor(a!) masked_gradient, Tensor gradient, Tensor? more, Tensor x, Tensor mean, "
    "Tensor rstd, Tensor? weight, Tensor? bias, Tensor? result) -> (Tensor, Tensor)"
)
_library.define(
    "batch_norm_input_gradient(Tensor gradient, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, "
    "Tensor for_weight, Tensor for_bias) -> Tensor"
)
apply_ = torch.ops.manyhands.batch_norm_apply_.default
forward_ = torch.ops.manyhands.batch_norm_forward_.default
backward = torch.ops.manyhands.batch_norm_backward.default
reduce_ = torch.ops.manyhands.batch_norm_reduce_.default
input_gradient = torch.ops.manyhands.batch_norm_input_gradient.default


def ready(device: torch.device, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> None:
    """Compile the kernels if the device is a GPU; :class:`CannotCompile` says why that is not possible."""
    if device.type != "cuda":
        return
    check_capability(device)
    with ThreadPoolExecutor(len(dtypes)) as pool:  # the compiler releases Python's lock
        for compilation in [pool.submit(compile_file, _FILE, device, NUMBER=_NUMBERS[dtype]) for dtype in dtypes]:
            compilation.result()
    _tickets(device)


def fits(x: torch.Tensor, *channels: torch.Tensor | None) -> bool:
    """Whether the operations accept ``x`` and these per-channel tensors: weight, bias, running statistics."""
    if x.dim() < 2 or not is_by_channel(x):
        return False
    if x.device.type == "cpu":
        return x.is_floating_point() and x.numel() > x.shape[1]
    if x.device.type != "cuda" or x.dtype not in _NUMBERS:
        return False
    return x.data_ptr() % _VECTOR == 0 and _fits_kernels(x, channels)


def _fits_kernels(x: torch.Tensor, channels: Sequence[torch.Tensor | None]) -> bool:
    row = x.shape[1] * x.element_size()
    if not row or row % _VECTOR or row > _VECTOR * _WIDEST * _MOST_COLUMNS:
        return False
    # Kernels count rows in an int, and a little beyond the last one.
    return all(is_plain(channel, x.device) for channel in channels) and 1 < x.numel() // x.shape[1] < 2**30


def is_plain(channels: torch.Tensor | None, device: torch.device) -> bool:
    return channels is None or (
        channels.dtype is torch.float32 and channels.is_contiguous() and channels.device == device
    )


def per_channel(x: torch.Tensor, running_mean: torch.Tensor | None) -> torch.Tensor:
    """Memory for the means or the deviations of ``x``, in the dtype of the statistics."""
    if x.device.type == "cpu":
        return torch.empty(x.shape[1], dtype=x.dtype if running_mean is None else running_mean.dtype)
    return _per_channel(x)


def is_by_channel(x: torch.Tensor) -> bool:
    """Whether the channels are innermost in memory, without gaps."""
    return x.movedim(1, -1).is_contiguous()


# On a GPU


def _of(x: torch.Tensor) -> Kernels:
    return compile_file(_FILE, x.device, NUMBER=_NUMBERS[x.dtype])


def _shape(x: torch.Tensor, kind: str) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """Rows, vectors in a row, the grid of blocks and the shape of one: as many blocks as run at the same time."""
    vectors = x.shape[1] * x.element_size() // _VECTOR
    rows = x.numel() // x.shape[1]
    wide = min(_WIDE[kind], 1 << (vectors - 1).bit_length())
    while wide * _MOST_COLUMNS < vectors:
        wide *= 2
    high = _THREADS[kind] // wide
    columns = -(-vectors // wide)
    together = multiprocessors(x.device) * _BLOCKS[kind]
    worth = -(-rows // (high * _ROWS[kind]))
    return rows, vectors, (max(1, min(worth, together // columns)), columns), (wide, high)


def _run_together(kernels: Kernels, device: torch.device, grid: tuple[int, int]) -> bool:
    """Whether all blocks of such a grid can run at the same time, each on its own multiprocessor."""
    return grid[0] * grid[1] <= multiprocessors(device) and kernels.can_launch(Launch.TOGETHER)


_taken = itertools.count()
_boards: dict[torch.device, torch.Tensor] = {}


def _counters(device: torch.device, which: int) -> torch.Tensor:
    """Counters for the blocks of one launch, which leave them ready for the next launch.

    Concurrent launches need different counters: these are used in rotation, out of very many.
    """
    if device not in _boards:
        _boards[device] = torch.zeros(2, _TICKETS, dtype=torch.int32, device=device)
    begin = next(_taken) * _MOST_COLUMNS % _TICKETS
    return _boards[device][which, begin : begin + _MOST_COLUMNS]


def _tickets(device: torch.device) -> torch.Tensor:
    """Counters by which the last block knows that it is the last."""
    return _counters(device, 0)


def _gates(device: torch.device) -> torch.Tensor:
    """Counters for blocks that wait for each other."""
    return _counters(device, 1)


def _per_channel(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape[1], dtype=torch.float32, device=x.device)


def _partial(x: torch.Tensor, grid: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """Memory for two sums of each channel of each block."""
    count = grid[0] * grid[1] * 2 * block[0] * _VECTOR // x.element_size()
    return torch.empty(count, dtype=torch.float32, device=x.device)


def _take_statistics(
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    momentum: float,
    epsilon: float,
) -> None:
    rows, vectors, grid, block = _shape(x, "sums")
    partial = _partial(x, grid, block)
    moved = (running_mean, running_variance, _tickets(x.device))
    numbers = (rows, vectors, float_bits(epsilon), float_bits(momentum))
    _of(x).launch("statistics", grid, block, x, partial, mean, rstd, *moved, *numbers)


def _apply_on_gpu(
    y: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    added: torch.Tensor | None,
    relu: bool,
) -> None:
    _normalise(y, x, (mean, rstd, weight, bias), added, relu, Launch.AFTER)


def _normalise(
    y: torch.Tensor,
    x: torch.Tensor,
    normal: tuple[torch.Tensor | None, ...],
    added: torch.Tensor | None,
    relu: bool,
    how: Launch,
) -> None:
    rows, vectors, grid, block = _shape(x, "numbers")
    name = "apply" if added is None else "apply_added"
    _of(x).launch(name, grid, block, y, x, *normal, added, int(relu), rows, vectors, how=how)


def _forward_on_gpu(
    y: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    momentum: float,
    epsilon: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    added: torch.Tensor | None,
    relu: bool,
) -> None:
    kernels = _of(x)
    rows, vectors, grid, block = _shape(x, "sums")
    wait = grid[0] > 1  # blocks of the same columns wait for each other
    if y is None or (wait and not _run_together(kernels, x.device, grid)):
        _take_statistics(mean, rstd, x, running_mean, running_variance, momentum, epsilon)
        if y is not None:
            _normalise(y, x, (mean, rstd, weight, bias), added, relu, _early(kernels))
        return
    name = "forward" if added is None else "forward_added"
    behind = (weight, bias, added, int(relu))
    statistics = (_partial(x, grid, block), mean, rstd, running_mean, running_variance, _gates(x.device))
    numbers = (rows, vectors, float_bits(epsilon), float_bits(momentum))
    how = Launch.TOGETHER if wait else Launch.AFTER
    kernels.launch(name, grid, block, y, x, *behind, *statistics, *numbers, how=how)


def _early(kernels: Kernels) -> Launch:
    """How the second of two consecutive kernels is launched."""
    return Launch.EARLY if kernels.can_launch(Launch.EARLY) else Launch.AFTER


def _backward_on_gpu(
    gradient: torch.Tensor,
    more: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    result: torch.Tensor | None,
    relu: bool,
    masked_gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normal = (mean, rstd, weight, bias)
    mask = "all" if not relu else "again" if result is None else "result"
    if more is not None and masked_gradient is None:
        masked_gradient = torch.empty_like(x)
    for_weight, for_bias = _reduce(gradient, more, x, normal, mask, result, masked_gradient)
    if masked_gradient is not None:
        gradient, result, mask = masked_gradient, None, "all"
    for_x = _input_gradient_of(gradient, x, normal, mask, result, (for_weight, for_bias), _early(_of(x)))
    return for_x, for_weight, for_bias


def _reduce(
    gradient: torch.Tensor,
    more: torch.Tensor | None,
    x: torch.Tensor,
    normal: tuple[torch.Tensor | None, ...],
    mask: str,
    result: torch.Tensor | None,
    masked_gradient: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of weight and bias; writes the gradient before the ReLU to ``masked_gradient``."""
    rows, vectors, grid, block = _shape(x, "sums")
    for_weight, for_bias = _per_channel(x), _per_channel(x)
    name = "_".join([mask] + ["keep"] * (masked_gradient is not None) + ["sum"] * (more is not None))
    arguments = (gradient, more, x, result, masked_gradient, *normal, _partial(x, grid, block), for_weight, for_bias)
    _of(x).launch(f"reduce_{name}", grid, block, *arguments, _tickets(x.device), rows, vectors)
    return for_weight, for_bias


def _input_gradient_of(
    gradient: torch.Tensor,
    x: torch.Tensor,
    normal: tuple[torch.Tensor | None, ...],
    mask: str,
    result: torch.Tensor | None,
    sums: tuple[torch.Tensor, torch.Tensor],
    how: Launch,
) -> torch.Tensor:
    rows, vectors, grid, block = _shape(x, "numbers")
    for_x = torch.empty_like(x)
    arguments = (for_x, gradient, x, result, *normal, *sums, rows, vectors)
    _of(x).launch(f"backward_{mask}", grid, block, *arguments, how=how)
    return for_x


def _reduce_on_gpu(
    masked_gradient: torch.Tensor,
    gradient: torch.Tensor,
    more: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    result: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = "again" if result is None else "result"
    return _reduce(gradient, more, x, (mean, rstd, weight, bias), mask, result, masked_gradient)


def _input_gradient_on_gpu(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    for_weight: torch.Tensor,
    for_bias: torch.Tensor,
) -> torch.Tensor:
    normal = (mean, rstd, weight, None)
    return _input_gradient_of(gradient, x, normal, "all", None, (for_weight, for_bias), Launch.AFTER)


def channel_sums(x: torch.Tensor) -> torch.Tensor:
    """The sum of each channel over all other dimensions, for GPU tensors that fit: the gradient of a bias.

    For channels_last tensors PyTorch takes up to ten times as long.
    """
    rows, vectors, grid, block = _shape(x, "sums")
    result = torch.empty(x.shape[1], dtype=x.dtype, device=x.device)
    partial = _partial(x, grid, block)
    _of(x).launch("channel_sums", grid, block, x, result, partial, _tickets(x.device), rows, vectors)
    return result


for _name, _here, _on_gpu in (
    ("batch_norm_apply_", reference.apply, _apply_on_gpu),
    ("batch_norm_forward_", reference.forward, _forward_on_gpu),
    ("batch_norm_backward", reference.backward, _backward_on_gpu),
    ("batch_norm_reduce_", reference.reduce, _reduce_on_gpu),
    ("batch_norm_input_gradient", reference.input_gradient, _input_gradient_on_gpu),
):
    _library.impl(_name, _here, "CPU")
    _library.impl(_name, _on_gpu, "CUDA")
