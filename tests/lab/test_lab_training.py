"""The lab's experiments that train, with PyTorch and small sizes; and what they conclude from figures."""

from __future__ import annotations

from typing import Any

import pytest
from support import lab_results

from manyhands.lab.experiments import training_scaling, unequal_devices
from manyhands.lab.experiments.training_scaling import Job, Outcome
from manyhands.lab.finding import Times

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    found = lab_results("torch", "training-scaling", "unequal-devices", "hidden-wait")
    return {result["experiment"]: result["finding"] for result in found}


def test_training_scales_over_nets_batch_sizes_and_devices(results: Results) -> None:
    (table,) = results["training-scaling"]["tables"]
    assert [row[1:4] for row in table["rows"]] == [[size, "0.05", count] for size in ("32", "128") for count in "12"]
    assert "Data: " in results["training-scaling"]["notes"][0]


def test_shares_are_measured_with_a_device_that_is_slow(results: Results) -> None:
    (table,) = results["unequal-devices"]["tables"]
    assert [row[0] for row in table["rows"]] == ["equal shares", "measured shares", "the fast one alone"]


def test_the_auditor_sees_the_printed_losses(results: Results) -> None:
    (table,) = results["hidden-wait"]["tables"]
    assert [row[2] for row in table["rows"]] == ["25", "0"]
    assert any("batch_loss.item()" in note for note in results["hidden-wait"]["notes"])


def _scaling(small: float, large: float) -> str:
    """The conclusion where two devices are so many times as fast with batch sizes 64 and 512."""
    gains = {(64, 1): 1.0, (64, 2): small, (512, 1): 1.0, (512, 2): large}
    return training_scaling.conclusion(
        {Job("lenet", size, 0.1, count): Outcome(0.8, [1 / gain], 1.0) for (size, count), gain in gains.items()}
    )


def test_each_outcome_of_scaling_has_its_sentence() -> None:
    assert "2 devices pay with batch size 64 (1.50 times as fast as one), batch size 512" in _scaling(1.5, 1.9)
    assert "pay with batch size 512 (1.90 times as fast as one); no clear gain with batch size 64" in (
        _scaling(0.7, 1.9)
    )
    assert "2 devices do not pay; no clear gain with batch size 64" in _scaling(0.7, 0.9)


@pytest.mark.parametrize(
    ("equal", "measured", "alone", "sentence"),
    [
        (2.0, 1.0, 0.5, "Leave the slow device out"),
        (2.0, 1.0, 1.5, "measuring them pays. Equal shares are slower than the fast device alone."),
        (2.0, 1.0, 2.5, "measuring them pays."),
        (2.0, 1.0, 1.0, "hardly worth having"),
        (1.0, 1.0, 2.0, "not unequal enough to matter"),
    ],
)
def test_each_outcome_of_shares_has_its_sentence(equal: float, measured: float, alone: float, sentence: str) -> None:
    times = Times({"equal shares": [equal], "measured shares": [measured], "the fast one alone": [alone]})
    assert sentence in unequal_devices.conclusion(times, [0.7, 0.3])
