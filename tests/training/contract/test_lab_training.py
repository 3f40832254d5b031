"""Experiments of the lab that train, in each framework; PyTorch's are in tests/lab."""

from __future__ import annotations

import pytest
from support import lab_results


@pytest.mark.long
def test_experiments_that_train(framework: str) -> None:
    lab_results(framework, "training-scaling", "logging-norms")
