"""What the lab needs of every framework; some experiments in sizes that only show that they work, all in long runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from support import lab_results, run_command

from manyhands.book.vocabulary import as_number
from manyhands.errors import ResultsDiffer
from manyhands.lab.bench import Bench
from manyhands.training.data.sources import as_numpy

pytestmark = pytest.mark.once


def test_operations_compute_the_same_everywhere(mh: Any, framework: str) -> None:
    bench = Bench(mh, framework, quick=True)
    operations, (device,) = bench.operations, bench.devices(1)
    x = bench.random((3, 3), device, seed=1, scale=2.0)
    expected = numpy.random.default_rng(1).standard_normal((3, 3), dtype="float32") * 2
    assert numpy.array_equal(as_numpy(mh.to(x, mh.cpu())), expected)
    results = [operations.matmul(x, x), operations.transpose(x)]
    wanted = [bench.tensor(values, device) for values in (expected @ expected, expected.T.copy())]
    bench.equal(results, wanted, tolerance=1e-3)
    assert all(mh.device_of(result) == mh.device_of(x) for result in results)
    assert numpy.allclose(as_number(operations.norm(x)), numpy.linalg.norm(expected), rtol=1e-4)
    assert bench.number(x, 2) == expected[0, 2]
    with pytest.raises(ResultsDiffer, match="result 0 by more than 0"):
        bench.equal(x * 2, x)


def test_experiments_without_training(framework: str) -> None:
    names = ["steps-in-flight", "many-small-tensors"]
    if framework == "torch":
        names.append("harder-graphs")
    results = lab_results(framework, *names)
    if framework == "torch":
        kinds = [plot["kind"] for plot in results[-1]["finding"]["plots"]]
        assert kinds == ["bar", "drawing", "timeline"] * 2


def test_an_experiment_alone(framework: str) -> None:
    """It makes its virtual devices itself: JAX cannot make them once its runtime has started."""
    lab_results(framework, "parameter-access")


@pytest.mark.long
def test_every_experiment_ends(framework: str, tmp_path: Path) -> None:
    page = tmp_path / "report.json"
    done = run_command("lab", "run", "all", "--quick", "--framework", framework, "--json", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    for result in json.loads(page.read_text())["results"]:
        assert result["status"] in ("done", "not here", "not measured")
        assert (result["finding"] is not None) == (result["status"] == "done")
