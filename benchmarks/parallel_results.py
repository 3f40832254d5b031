"""Whether the ways of a row of `benchmarks/parallel.py` give the same results: to the bit, or as exact as eager's."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from exact import float64
from parallel_case import Case
from torch.utils._pytree import tree_leaves

from manyhands.errors import CannotBeExact


def copied(results: Any) -> list[torch.Tensor]:
    return [leaf.detach().clone() for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def difference(results: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """0 where all is equal to the bit, else the norm of the difference over that of what was expected, all together."""
    if len(results) != len(expected) or any(a.shape != b.shape for a, b in zip(results, expected, strict=True)):
        return float("inf")
    if all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)):
        return 0.0
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(results, expected, strict=True))
    whole = sum(float(b.double().square().sum()) for b in expected)
    return (apart / max(whole, 1e-300)) ** 0.5


class Wanted:
    """What eager gives, and how other results stand to it."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._expected = copied(case.function(*case.arguments))

    @functools.cached_property
    def _exactly(self) -> list[torch.Tensor]:
        assert self._case.exact is not None
        return copied(self._case.exact(*self._case.arguments))

    def judge(self, results: list[torch.Tensor]) -> tuple[bool, str, float]:
        """Whether results are right, in words, and their difference from eager's."""
        apart = difference(results, self._expected)
        if apart == 0:
            return True, "equal to the bit", apart
        if self._case.exact is not None and apart < float("inf"):
            with contextlib.suppress(CannotBeExact):
                coarse = torch.finfo(self._case.coarse).eps
                verdict = float64.verdict(results, self._expected, self._exactly, coarse)
                if verdict.accepted:
                    return True, f"as exact as eager ({verdict.error:.2f} of its error)", apart
                return False, f"NOT EQUAL to eager, and {verdict.words}", apart
        if apart <= self._case.close:
            return True, f"equal to {apart:.0e}", apart
        return False, f"NOT EQUAL to eager: {apart:.1e}", apart
