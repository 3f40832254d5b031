"""The lab's experiments that train, with PyTorch and small sizes; and what they conclude from figures."""

from __future__ import annotations

from typing import Any

import pytest
from support import lab_results

from manyhands.lab.experiments import training_scaling, unequal_devices
from manyhands.lab.experiments.training_scaling import Job
from manyhands.lab.finding import Implausible, Sweep, Times

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
    assert "norm = operations.numpy(norm)" in read
    assert "keep the log on the device: 0 waits" in kept


JOBS = [Job("lenet", size, 0.1) for size in (64, 512)]


def _sweep(small: float, large: float) -> Sweep:
    """Two devices are so many times as fast with batch sizes 64 and 512."""
    return Sweep(
        {
            job: Times({"1 device": [2.0] * 3, "2 devices": [2 / gain] * 3})
            for job, gain in zip(JOBS, (small, large), strict=True)
        }
    )


def test_each_outcome_of_scaling_has_its_sentence() -> None:
    both, one, none = (training_scaling.conclusion(_sweep(*gains)) for gains in ((1.5, 1.9), (0.7, 1.9), (0.7, 0.9)))
    assert both.startswith("2 devices pay with lenet, batch size 64, lr 0.1 (1.50 times as fast as one); lenet, batch")
    assert "batch size 512, lr 0.1 (1.90 times as fast as one). No clear gain with lenet, batch size 64" in one
    assert none.startswith("2 devices do not pay. No clear gain with lenet, batch size 64, lr 0.1 (0.70); lenet")
    with pytest.raises(Implausible, match=r"2 devices was 77\.54 times as fast as 1 device"):
        training_scaling.conclusion(_sweep(1.5, 77.54))


@pytest.mark.parametrize(
    ("equal", "measured", "alone", "sentence"),
    [
        (2.0, 1.0, 0.5, "leave the slow device out"),
        (2.0, 1.0, 1.5, "is 1.50 times as fast, compared with the fast device alone: measuring them pays"),
        (2.0, 1.0, 1.0, "it hardly matters"),
    ],
)
def test_each_outcome_of_shares_has_its_sentence(equal: float, measured: float, alone: float, sentence: str) -> None:
    times = Times({"equal shares": [equal], "measured shares": [measured], "the fast one alone": [alone]})
    assert sentence in unequal_devices.conclusion(times, [0.7, 0.3])
