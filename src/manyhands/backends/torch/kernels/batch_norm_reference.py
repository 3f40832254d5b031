"""The operations of :mod:`.batch_norm`, implemented with PyTorch's operations: slow, for CPUs and for tests.

Each has the parameters of the operation that it implements.
"""

from __future__ import annotations

import torch

_aten = torch.ops.aten


def apply(
    y: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    added: torch.Tensor | None,
    relu: bool,
) -> None:
    shape = (1, -1, *[1] * (x.dim() - 2))
    value = (x.to(mean.dtype) - mean.view(shape)) * rstd.view(shape)
    value = value * weight.view(shape) if weight is not None else value
    value = value + bias.view(shape) if bias is not None else value
    value = value.to(x.dtype)
    value = value + added if added is not None else value
    y.copy_(value.relu() if relu else value)


def forward(
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
    _, *statistics = _aten.native_batch_norm(x, None, None, running_mean, running_variance, True, momentum, epsilon)
    for memory, taken in zip((mean, rstd), statistics, strict=True):
        memory.copy_(taken)
    if y is not None:
        apply(y, x, mean, rstd, weight, bias, added, relu)


def backward(
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
    gradient = gradient + more if more is not None else gradient
    if relu:
        if result is None:
            result = torch.empty_like(x)
            apply(result, x, mean, rstd, weight, bias, None, relu=False)
        gradient = _aten.threshold_backward(gradient, result, 0)
    if masked_gradient is not None:
        masked_gradient.copy_(gradient)
    weight = weight if weight is not None else torch.ones_like(mean)
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _aten.native_batch_norm_backward(
        gradient, x, weight, None, None, mean, rstd, True, 0.0, [True, True, True]
    )
    return gradients


def reduce(
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
    _, for_weight, for_bias = backward(gradient, more, x, mean, rstd, weight, bias, result, True, masked_gradient)
    return for_weight, for_bias


def input_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    for_weight: torch.Tensor,
    for_bias: torch.Tensor,
) -> torch.Tensor:
    return backward(gradient, None, x, mean, rstd, weight, None, None, False, None)[0]
