"""Fake tensors as traces make them have the forms that PyTorch's own have, also where PyTorch is not asked again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from manyhands.backends.torch import compat

_aten = torch.ops.aten
SHAPES = [(2, 3), (1, 3), (2, 3, 4), (2, 3, 4, 4), (2, 3, 1, 1), (1, 1, 1, 1), (2, 3, 1, 4), (2, 3, 4, 4, 4)]


def both_modes() -> list[Any]:
    plain = compat.FakeTensorMode(
        allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
    )
    return [plain, compat.RememberingFakeMode()]


def forms(results: Any) -> list[Any]:
    return [(result.shape, result.stride(), result.dtype, result.device) for result in results]


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_has_the_forms_of_pytorch(shape: tuple[int, ...]) -> None:
    for training, affine, dtype, transposed in itertools.product(
        (True, False), (True, False), (torch.float32, torch.float64, torch.bfloat16), (False, True)
    ):
        seen: list[Any] = []
        for mode in both_modes():
            with mode:
                given = torch.empty(shape, dtype=dtype)
                given = torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1]) if transposed else given
                weight = torch.empty(shape[1], dtype=dtype) if affine else None
                mean = torch.empty(shape[1], dtype=dtype)
                try:
                    results = _aten.native_batch_norm.default(given, weight, weight, mean, mean, training, 0.1, 1e-5)
                    seen.append(forms(results))
                except ZeroDivisionError as error:
                    seen.append(type(error))
        assert seen[0] == seen[1]


def test_a_write_of_known_forms_gives_its_first_argument_back() -> None:
    with compat.RememberingFakeMode():
        for _ in range(2):
            weight, gradient = torch.empty(3, 4), torch.empty(3, 4)
            assert weight.add_(gradient, alpha=-0.1) is weight


def test_a_write_that_pytorch_refuses_is_refused_after_one_that_it_accepts() -> None:
    with compat.RememberingFakeMode():
        torch.empty(3, 4).add_(torch.empty(3, 4))
        with pytest.raises(RuntimeError):
            torch.empty(3, 4).add_(torch.empty(5, 4))
        with pytest.raises(RuntimeError):
            torch.empty(3, 4, dtype=torch.int64).add_(torch.empty(3, 4))
