"""Attention in float64, from basic operations: the GPU kernels compute only in half or single precision.

    softmax(query @ key^T * scale + bias) @ value

Autograd differentiates the same formula for the backward pass. Both return what the operations of a trace return, in
the same order. Values that only the kernels' backward passes use (random state, addresses) are placeholders: nothing
reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from manyhands.backends.torch import compat

_aten = torch.ops.aten
_FORWARD = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
_BACKWARD = (
    _aten._scaled_dot_product_flash_attention_backward.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
    _aten._scaled_dot_product_cudnn_attention_backward.default,
)


def is_attention(target: Any) -> bool:
    return target in _FORWARD or target in _BACKWARD


def attention(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], metas: Sequence[Any]) -> tuple[Any, ...]:
    """The operation's results in float64; ``metas`` have their shapes and strides."""
    arguments: dict[str, Any] = {}
    for number, argument in enumerate(compat.schema(target).arguments):
        left_out = kwargs.get(argument.name, argument.default_value)
        arguments[argument.name] = args[number] if number < len(args) else left_out
    if arguments["dropout_p"]:
        raise ValueError("dropout draws random numbers")
    return _forward(arguments, metas) if target in _FORWARD else _backward(arguments, metas)


def _forward(arguments: Mapping[str, Any], metas: Sequence[Any]) -> tuple[Any, ...]:
    result, sums = _written_out(
        arguments, arguments["query"], arguments["key"], arguments["value"], arguments.get("attn_bias")
    )
    results = [_substitute(meta) for meta in metas]
    results[0] = result
    if isinstance(results[1], torch.Tensor) and results[1].shape == sums.shape:  # a kernel may omit or pad it
        results[1] = sums
    return tuple(results)


def _backward(arguments: Mapping[str, Any], metas: Sequence[Any]) -> tuple[Any, ...]:
    values = [arguments.get(name) for name in ("query", "key", "value", "attn_bias")]
    leaves = [
        value.detach().double() if isinstance(value, torch.Tensor) and value.numel() else None for value in values
    ]
    gradient = arguments["grad_out"] if "grad_out" in arguments else arguments["grad_out_"]
    with torch.enable_grad():
        wanted = [leaf.requires_grad_() for leaf in leaves if leaf is not None]
        result, _ = _written_out(arguments, *leaves)
        derivatives = iter(torch.autograd.grad(result, wanted, gradient.to(result.dtype)))
    gradients = [None if leaf is None else next(derivatives) for leaf in leaves][: len(metas)]
    return tuple(
        derivative if isinstance(meta, torch.Tensor) else None
        for derivative, meta in zip(gradients, metas, strict=True)
    )


def _written_out(arguments: Mapping[str, Any], query: Any, key: Any, value: Any, bias: Any) -> tuple[Any, Any]:
    """The result, and the logarithms of the sums that the softmax divides by."""
    query, key, value = query.double(), key.double(), value.double()
    groups = query.shape[-3] // key.shape[-3]  # query heads per key head
    key, value = (tensor.repeat_interleave(groups, -3) if groups > 1 else tensor for tensor in (key, value))
    scale = arguments["scale"] if arguments["scale"] is not None else 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale
    if isinstance(bias, torch.Tensor) and bias.numel():
        scores = scores + bias
    if arguments["is_causal"]:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _substitute(meta: Any) -> Any:
    if not isinstance(meta, torch.Tensor):
        return meta
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
