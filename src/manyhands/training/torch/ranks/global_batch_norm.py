"""Batch normalisation over the whole batch, wherever its samples are.

:func:`use_global_statistics` replaces the normalisation of every BatchNorm layer of a model by one whose statistics
are those of all ranks together: the result equals that of one device for even and uneven shards, and a rank without
samples takes part with a count of zero. Works on CPUs and GPUs (PyTorch's SyncBatchNorm refuses the CPU).

Means and sums of squared deviations of the shards are merged exactly (Chan, Golub and LeVeque 1979): with counts n_i,
means m_i and squared deviations s_i the whole has m = sum(n_i m_i) / n and s = sum(s_i + n_i (m_i - m)^2).

The layers have a separate process group. Sums of gradients start while the backward pass runs, at a moment that depends
on which parameters a rank used: in one group, the sum of one rank could be matched with the statistics of another.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from manyhands.backends.torch import compat

_group: Any = None


def normalises_batches(model: torch.nn.Module) -> bool:
    """Whether the model has a BatchNorm in training mode."""
    return any(isinstance(layer, compat.BatchNorm) and layer.training for layer in model.modules())


def use_global_statistics(model: torch.nn.Module) -> None:
    """Make every BatchNorm layer of the model use the statistics of all ranks while it trains."""
    if dist.is_initialized():
        _make_group()
    for layer in model.modules():
        if isinstance(layer, compat.BatchNorm):
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def use_local_statistics(model: torch.nn.Module) -> None:
    """Undo :func:`use_global_statistics`."""
    for layer in model.modules():
        if getattr(layer.__dict__.get("forward"), "__func__", None) is _forward:
            del layer.forward


def _make_group() -> None:
    """Make the layers' group, or keep that of an earlier job of the same world."""
    global _group
    try:
        dist.get_group_rank(_group, dist.get_rank())
    except ValueError:  # none yet, or one of a world that is gone
        _group = dist.new_group()


def _forward(layer: compat.BatchNorm, x: torch.Tensor) -> torch.Tensor:
    if not layer.training or not dist.is_initialized():
        return type(layer).forward(layer, x)
    compat.check_input(layer, x)
    result, mean, variance, count = _Normalise.apply(x, layer.weight, layer.bias, layer.eps)  # type: ignore[no-untyped-call]
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            _track(layer, mean, variance, count)
    return result  # type: ignore[no-any-return]


def _track(layer: compat.BatchNorm, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    momentum: Any = layer.momentum
    if momentum is None:  # a cumulative average
        momentum = 1.0 / layer.num_batches_tracked.to(mean.dtype)  # type: ignore[union-attr]
    unbiased = variance * (count / (count - 1).clamp(min=1))
    layer.running_mean += momentum * (mean.to(layer.running_mean.dtype) - layer.running_mean)
    layer.running_var += momentum * (unbiased.to(layer.running_var.dtype) - layer.running_var)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float) -> tuple[torch.Tensor, ...]:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        axes = [0, *range(2, x.dim())]
        samples = x.numel() // x.shape[1]
        local = _local_statistics(wide, axes, samples)
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local, group=_group)
        counts, means, squares = torch.stack(gathered).unbind(1)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean) ** 2).sum(0) / total
        scale = torch.rsqrt(variance + eps)
        shape = [1, -1, *[1] * (x.dim() - 2)]
        normalised = (wide - mean.view(shape)) * scale.view(shape)
        result = normalised if weight is None else normalised * weight.view(shape) + bias.view(shape)
        ctx.save_for_backward(normalised, scale, weight, total)
        ctx.axes, ctx.shape, ctx.dtype = axes, shape, x.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return result.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        normalised, scale, weight, total = ctx.saved_tensors
        gradient = gradients[0].to(normalised.dtype)
        sums = torch.stack([gradient.sum(ctx.axes), (gradient * normalised).sum(ctx.axes)])
        bias_gradient, weight_gradient = sums[0].clone(), sums[1].clone()  # of this shard: summed with the others later
        dist.all_reduce(sums, group=_group)
        means = (sums / total).view(2, *ctx.shape)
        factor = scale if weight is None else scale * weight
        x_gradient = factor.view(ctx.shape) * (gradient - means[0] - normalised * means[1])
        affine = (None, None) if weight is None else (weight_gradient, bias_gradient)
        return x_gradient.to(ctx.dtype), *affine, None


def _local_statistics(x: torch.Tensor, axes: list[int], samples: int) -> torch.Tensor:
    """Count, mean and squared deviations per channel, as one tensor; zeros for an empty shard."""
    if not samples:
        return x.new_zeros(3, x.shape[1])
    mean = x.mean(axes)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return torch.stack([torch.full_like(mean, samples), mean, ((x - mean.view(shape)) ** 2).sum(axes)])
