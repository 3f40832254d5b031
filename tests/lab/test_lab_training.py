"""The lab's experiments that train, with PyTorch and small sizes; and what they conclude from figures."""

from __future__ import annotations

from typing import Any

import pytest
from support import lab_results

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    found = lab_results("torch", "training-scaling", "unequal-devices", "logging-norms")
    return {result["experiment"]: result["finding"] for result in found}


def test_training_scales_over_nets_batch_sizes_and_devices(results: Results) -> None:
    (table,) = results["training-scaling"]["tables"]
    assert table["headers"] == ["job", "1 device", "2 devices", "times as fast as 1 device"]
    assert [row[0] for row in table["rows"]] == [f"lenet, batch size {size}, lr 0.05" for size in (32, 128)]
    assert "Data: " in results["training-scaling"]["notes"][0]


def test_shares_are_measured_with_a_device_that_is_slow(results: Results) -> None:
    (table,) = results["unequal-devices"]["tables"]
    assert [row[0] for row in table["rows"]] == ["equal shares", "measured shares", "the fast one alone"]


def test_the_auditor_sees_the_norms_that_are_read(results: Results) -> None:
    _, read, kept = results["logging-norms"]["notes"]
    assert "read each norm: 50 waits in 50 products" in read
    assert "norm = as_number(norm)" in read
    assert "keep the log on the device: 0 waits" in kept
