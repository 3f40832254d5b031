"""The same weights in every framework: the same answers, and a run that goes from one to another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import reference
from training_bench import Bench, run_of

from manyhands.book.models import WEIGHT_NAMES
from manyhands.cli import convert
from manyhands.device import FRAMEWORKS
from manyhands.errors import BadRunFolder, WrongCheckpoint


def run_of_torch(folder: Path, model: str) -> Path:
    """A run of PyTorch's with the reference weights, made without PyTorch."""
    weights = WEIGHT_NAMES["torch"].from_common(reference.weights(model), model)
    return run_of(folder, weights, {"train": {"model": model}})


LONG = {"small-resnet": pytest.mark.long, "resnet18": pytest.mark.long}


@pytest.mark.parametrize("model", [pytest.param(name, marks=LONG.get(name, ())) for name in reference.MODELS])
def test_the_same_weights_give_the_same_logits(bench: Bench, model: str) -> None:
    run = run_of_torch(bench.folder / "torch", model)
    if bench.framework != "torch":
        run = convert.convert(run, bench.framework)
    found = bench.scores(bench.recipes.load_model(run), reference.images())
    np.testing.assert_allclose(found, reference.logits(model), atol=1e-4)


def test_training_goes_on_from_converted_weights(bench: Bench) -> None:
    run = run_of_torch(bench.folder / "torch", "mlp")
    made = convert.convert(run, bench.framework, bench.folder / "converted")
    result = bench.fit(2, model="mlp", epochs=2, run=made, resume="auto")
    assert [row["epoch"] for row in result.rows] == [2]


@pytest.mark.parametrize("model", reference.MODELS)
def test_there_and_back_is_the_same(framework: str, model: str) -> None:
    weights = reference.weights(model)
    there = convert.convert_weights(weights, model, "torch", framework)
    back = convert.convert_weights(there, model, framework, "torch")
    for name, tensor in weights.items():
        np.testing.assert_array_equal(back[name], tensor)


def test_a_run_of_another_framework_is_not_loaded(bench: Bench) -> None:
    other = next(name for name in FRAMEWORKS if name != bench.framework)
    run = convert.convert(run_of_torch(bench.folder / "torch", "mlp"), other, bench.folder / "other")
    with pytest.raises(WrongCheckpoint, match=f"convert .* --to {bench.framework}"):
        bench.recipes.load_model(run)
    with pytest.raises(WrongCheckpoint, match=f"convert RUN --to {bench.framework}"):
        bench.fit(epochs=2, run=run, resume="auto")


def test_what_cannot_be_converted_is_said(tmp_path: Path) -> None:
    run = run_of_torch(tmp_path / "torch", "mlp")
    made = convert.convert(run, "torch")
    assert made.name == "torch-torch"
    assert json.loads((made / "config.json").read_text())["train"]["framework"] == "torch"
    for out in (made, run):
        with pytest.raises(BadRunFolder, match="checkpoints already"):
            convert.convert(run, "torch", out)
    with pytest.raises(BadRunFolder, match="no run"):
        convert.convert(tmp_path / "nowhere", "torch")
    (run / "config.json").write_text("{}")
    with pytest.raises(BadRunFolder, match="which model"):
        convert.convert(run, "jax")
