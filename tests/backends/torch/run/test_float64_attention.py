"""Attention written out in float64, beside PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from manyhands.backends.torch.run.float64_attention import attention, is_attention

_aten = torch.ops.aten


def heads(*shape: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward_are_pytorchs(causal: bool) -> None:
    q, k, v = (one.requires_grad_() for one in heads(5, 4))
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal)
    gradient = torch.ones_like(expected)
    wanted = torch.autograd.grad(expected, [q, k, v], gradient)
    sums = torch.empty(2, 3, 5)
    nothing = torch.empty(0)
    with torch.no_grad():
        metas: list[Any] = [expected, sums, None, None, 5, 5, nothing, nothing, nothing]
        target = _aten._scaled_dot_product_flash_attention.default
        result, logarithms, *_ = attention(target, (q, k, v, 0.0, causal), {}, metas)
        torch.testing.assert_close(result, expected.detach())
        assert logarithms.shape == sums.shape
        given = (gradient, q, k, v, result, logarithms, None, None, 5, 5, 0.0, causal, nothing, nothing)
        backward = _aten._scaled_dot_product_flash_attention_backward.default
        torch.testing.assert_close(attention(backward, given, {}, [q, k, v]), tuple(wanted))


def test_a_bias_counts_and_has_a_gradient() -> None:
    q, k, v = heads(5, 4)
    bias = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)
    gradient = torch.ones_like(expected)
    (wanted,) = torch.autograd.grad(expected, [bias], gradient)
    with torch.no_grad():
        target = _aten._scaled_dot_product_efficient_attention.default
        result, *_ = attention(target, (q, k, v, bias, True), {"scale": 0.3}, [expected, torch.empty(2, 3, 32), q, q])
        torch.testing.assert_close(result, expected.detach())
        given = (gradient, q, k, v, bias, result, q, q, q, 0.0, [True] * 4)
        backward = _aten._scaled_dot_product_efficient_attention_backward.default
        *_, found = attention(backward, given, {"scale": 0.3}, [q, k, v, bias])
        torch.testing.assert_close(found, wanted)


def test_only_attention_is_written_out_and_not_with_dropout() -> None:
    assert not is_attention(_aten.mm.default)
    q, k, v = heads(5, 4)
    with pytest.raises(ValueError, match="random"):
        attention(_aten._scaled_dot_product_flash_attention.default, (q, k, v, 0.5), {}, [q] * 9)
