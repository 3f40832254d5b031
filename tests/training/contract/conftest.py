"""The bench that the contract suite of training works at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import leave_graphs_as_they_are
from training_bench import MOST, Bench

from manyhands.book import recipes


@pytest.fixture(scope="session")
def own_recipes(framework: str, mh: Any) -> Any:
    """The framework's recipes, with virtual CPU devices before it starts."""
    mh.Trainer(1, devices=f"cpu:{MOST}")
    if framework == "tensorflow":
        leave_graphs_as_they_are()
    return recipes.of(framework)


@pytest.fixture
def bench(framework: str, own_recipes: Any, mh: Any, tmp_path: Path) -> Bench:
    return Bench(framework, mh, own_recipes, tmp_path)
