"""Experiments of the lab in each framework, with sizes that only show that they work."""

from __future__ import annotations

import pytest
from support import lab_results


@pytest.mark.once
def test_experiments_without_training(framework: str) -> None:
    names = "harder-graphs", "steps-in-flight", "many-small-tensors"
    graphs, *_ = lab_results(framework, *names)
    pictures = ["drawing", "timeline"] if framework == "torch" else []  # the others have no plan to draw
    assert [plot["kind"] for plot in graphs["finding"]["plots"]] == ["bar", *pictures] * 2


@pytest.mark.once
def test_an_experiment_alone(framework: str) -> None:
    """It makes its virtual devices itself: JAX cannot make them once its runtime has started."""
    lab_results(framework, "parameter-access")
