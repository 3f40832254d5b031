"""Copies of results, and how a kernel that copies many tensors divides the work."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from manyhands.backends.torch.run import copies  # noqa: E402

CHUNK = copies._CHUNK


def test_copies_of_results_share_memory_where_results_do() -> None:
    y, other, turned = torch.rand(4, 4), torch.rand(3), torch.view_as_complex(torch.rand(3, 2))
    values = [y, y[1:3], 7, other, y.t(), y, turned, turned.conj()]
    made = copies.copy_all(values)
    for one, copy in zip(values, made, strict=True):
        assert torch.equal(copy, one) if isinstance(one, torch.Tensor) else copy == one
    assert made[0] is made[5]
    made[0].zero_()
    assert not made[1].any()
    assert not made[4].any()
    assert y.all()
    assert torch.equal(made[3], other)


@pytest.mark.parametrize(
    "sizes",
    [[1], [0], [0, 0], [CHUNK], [CHUNK + 1, 0, 5, 0], [0, 3 * CHUNK - 1, 7], [0, 0, 2 * CHUNK], [1] * 480],
    ids=lambda sizes: f"{len(sizes)} of {sum(sizes)} bytes",
)
def test_every_byte_is_copied_by_one_block(sizes: list[int]) -> None:
    """As the kernel looks for it: a block's part is the last one whose first block is not behind it."""
    firsts, blocks = copies.pieces(sizes)
    copied = [0] * len(sizes)
    for block in range(blocks):
        part = max(number for number, first in enumerate(firsts) if first <= block)
        assert copied[part] == min(sizes[part], (block - firsts[part]) * CHUNK)  # right behind the block before
        copied[part] = min(sizes[part], (block - firsts[part] + 1) * CHUNK)
    assert copied == sizes


def test_what_can_be_copied_as_bytes() -> None:
    def can_be_copied(*tensors: Any) -> bool:
        return copies.can_be_copied(tensors, torch.device("cpu"))

    x = torch.rand(4, 6)
    assert can_be_copied(x, x.t(), x[1:3], x.flatten()[5:], torch.rand(()), torch.rand(0, 3), x[:, :1].t()[:, :1])
    assert not can_be_copied(x[:, ::2])
    assert not can_be_copied(x.sum().expand(3))
    assert not can_be_copied(torch.view_as_complex(torch.rand(3, 2)).conj())
    assert not can_be_copied(x.to_sparse())
    assert not can_be_copied(x, torch.rand(3, device="meta"))
    assert not can_be_copied()
    assert not can_be_copied(*[x] * 500)
