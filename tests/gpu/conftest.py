"""Tests that need a GPU: skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
