"""Batches as tfds, grain and Hugging Face give them: dicts, nested inputs, random-access sources, one-hot labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax_cases import CLASSES, Net, difference, fit, rows, same, vectors

from manyhands import jax as mh
from manyhands.errors import BadBatch, BadLabels
from manyhands.training.options import Checkpoints

X, Y = vectors(48)
DICTS = {"image": X, "label": Y}


def cut(data: Any, start: int, stop: int) -> Any:
    if isinstance(data, dict):
        return {name: cut(part, start, stop) for name, part in data.items()}
    return tuple(cut(part, start, stop) for part in data) if isinstance(data, tuple) else data[start:stop]


def loader(data: Any) -> list[Any]:
    return [cut(data, start, start + 16) for start in range(0, 48, 16)]


class Source:
    """As grain has it: a length, and samples by number."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, number: int) -> Any:
        sample = cut(self.data, number, number + 1)
        return {name: part[0] for name, part in sample.items()} if isinstance(sample, dict) else sample[0]


class Table(Source):
    """As Hugging Face has it: samples by number, which can also be iterated."""

    def __iter__(self) -> Any:
        return (self[number] for number in range(len(self)))


@pytest.fixture(scope="module")
def plain() -> Any:
    """Trained with (X, y) arrays, and with a loader of (X, y), which has another order."""
    return fit(Net(), ((X, Y), (X, Y))), fit(Net(), (loader((X, Y)), loader((X, Y))))


@pytest.mark.parametrize(("kind", "devices"), [(dict, 2), (Source, 2), (Table, 1)])
def test_a_dict_of_arrays_and_samples_by_number_are_the_same_data_as_tuples(
    plain: Any, kind: Any, devices: int
) -> None:
    """Random-access sources come in the one order of samples, on any number of devices."""
    (weights, result), _ = plain
    trained, other = fit(Net(), (kind(DICTS), kind(DICTS)), devices)
    assert difference(trained, weights) < 1e-5
    for row, expected in zip(rows(other), rows(result), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_a_loader_of_dicts(plain: Any) -> None:
    _, (weights, result) = plain
    trained, other = fit(Net(), (loader(DICTS), loader(DICTS)))
    assert same(trained, weights)
    assert rows(other) == rows(result)


def test_a_stopped_run_of_samples_by_number_goes_on(tmp_path: Path) -> None:
    class Stops(Source):
        left = 60

        def __getitem__(self, number: int) -> Any:
            self.left -= 1
            if not self.left:
                raise KeyError
            return super().__getitem__(number)

    how: dict[str, Any] = {"run": tmp_path / "run", "checkpoints": Checkpoints(every=1)}
    with pytest.raises(KeyError):
        fit(Net(), Stops(DICTS), **how)
    resumed, _ = fit(Net(), Source(DICTS), **how, resume="auto")
    whole, _ = fit(Net(), Source(DICTS))
    assert same(resumed, whole)


class Two(nnx.Module):
    """Takes two inputs, by name or as one dict."""

    def __init__(self) -> None:
        self.net = Net()

    def __call__(self, left: Any, right: Any = None) -> Any:
        left, right = (left["left"], left["right"]) if isinstance(left, dict) else (left, right)
        return self.net(jnp.concatenate([left, right], 1))


class AsOne(Two):
    def __call__(self, pair: Any) -> Any:  # type: ignore[override]
        return super().__call__(pair)


def test_nested_inputs_and_inputs_by_name(plain: Any) -> None:
    (weights, result), _ = plain
    left, right = X[:, :2], X[:, 2:]
    by_name, pair = {"left": left, "right": right, "labels": Y, "number": np.arange(48)}, {"left": left, "right": right}
    for model, data, devices in (
        (Two(), by_name, 1),
        (Two(), (pair, Y), 2),
        (AsOne(), {**pair, "target": Y}, 1),
    ):
        trained, other = fit(model, data, devices)
        assert difference({name.removeprefix("net."): value for name, value in trained.items()}, weights) < 1e-5
        assert other.rows[-1]["train_acc"] == pytest.approx(result.rows[-1]["train_acc"])
    outputs = mh.Trainer(quiet=True).predict(model, pair)
    np.testing.assert_allclose(outputs, model(pair), rtol=1e-5, atol=1e-6)


def test_a_step_gets_the_dict_and_linen_gets_its_inputs(plain: Any) -> None:
    class Stepping(Net):
        def training_step(self, batch: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(self(batch["image"]), batch["label"]).mean()

    class LinenNet(linen.Module):
        @linen.compact
        def __call__(self, image: Any) -> Any:
            return linen.Dense(CLASSES)(image)

    stepped, _ = fit(Stepping(), DICTS)
    assert difference(stepped, plain[0][0]) < 1e-5
    trainer = mh.Trainer(1, lr=0.1, batch_size=16, quiet=True)
    trainer.fit(LinenNet(), {**DICTS, "weight": np.ones(48)})
    assert trainer.model.variables["params"]["Dense_0"]["kernel"].shape == (6, CLASSES)


def test_one_hot_labels_are_the_same_job(plain: Any) -> None:
    (weights, result), _ = plain
    one_hot = (X, np.eye(CLASSES)[Y])
    trained, other = fit(Net(), (one_hot, one_hot), 2)
    assert difference(trained, weights) < 1e-5
    for name in ("train_loss", "train_acc", "val_loss", "val_acc"):
        assert other.rows[-1][name] == pytest.approx(result.rows[-1][name], rel=1e-5)
    with pytest.raises(BadLabels, match=r"shape \(48, 2\), and one class number per sample is needed"):
        fit(Net(), (X, np.eye(2, dtype=int)[Y % 2]))


def test_dicts_that_cannot_be_read() -> None:
    with pytest.raises(BadBatch, match=r"none of these is the target: call it 'label'.*training_step\(batch\)"):
        fit(Net(), {"image": X, "kind": Y})
    with pytest.raises(BadBatch, match="unlike shapes"):
        fit(Net(), Source({"image": X, "label": [np.zeros(1 + number % 2) for number in range(48)]}))
    with pytest.raises(BadBatch, match="the data hold text"):
        fit(Net(), Source({**DICTS, "id": np.array(["a"] * 48)}))
