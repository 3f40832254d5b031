"""Experiments of the lab in each framework, with sizes that only show that they work."""

from __future__ import annotations

import pytest
from support import lab_results


@pytest.mark.once
def test_experiments_without_training(framework: str) -> None:
    names = ["steps-in-flight", "many-small-tensors"]
    if framework == "torch":
        names.append("harder-graphs")
    results = lab_results(framework, *names)
    if framework == "torch":
        kinds = [plot["kind"] for plot in results[-1]["finding"]["plots"]]
        assert kinds == ["bar", "drawing", "timeline"] * 2


@pytest.mark.once
def test_an_experiment_alone(framework: str) -> None:
    """It makes its virtual devices itself: JAX cannot make them once its runtime has started."""
    lab_results(framework, "parameter-access")
