"""Tests that need a GPU: skipped, with the reason, where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # exact: results in float64


@pytest.fixture(autouse=True)
def gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture
def same_kernels() -> Iterator[None]:
    """What cuDNN takes for a convolution is chosen by rule, not by a race, and adds in one order."""
    import torch

    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    torch._dynamo.reset()
    yield
    cudnn.deterministic, cudnn.benchmark = before


@pytest.fixture
def whole_float32() -> Iterator[None]:
    """TF32 is off; Dynamo begins and ends without captures."""
    import torch

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.backends.cudnn.allow_tf32 = before
