"""Metrics, evaluation and prediction: every sample once and in order, the same on any number of devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_bench import Bench

from manyhands.errors import BadBatch, BadSettings, MetricFailed
from manyhands.training.data.sources import as_numpy


def top_three(outputs: Any, targets: Any) -> float:
    """How often the target is among the three highest scores."""
    scores, labels = as_numpy(outputs), as_numpy(targets)
    return float((np.argsort(-scores, axis=1)[:, :3] == labels[:, None]).any(1).mean())


def order(outputs: Any, targets: Any) -> list[float]:
    """What tells one order of samples from another, and how many there are."""
    labels = as_numpy(targets).astype(np.float64)
    return [len(as_numpy(outputs)), len(labels), float((labels * np.arange(len(labels))).sum())]


def y_true_first(y_true: Any, y_pred: Any) -> float:
    return float(as_numpy(y_pred).ndim - as_numpy(y_true).ndim)


# Metrics


def test_metrics_see_every_sample_once_on_any_number_of_devices(bench: Bench) -> None:
    metrics: dict[str, Any] = {"top_three": top_three, "order": order, "difference": y_true_first}
    if bench.own.metric is not None:
        metrics["own"] = bench.own.metric
    data = bench.data(samples=32, tested=530)
    rows = [bench.fit(count, epochs=1, data=data, metrics=metrics).rows[-1] for count in (1, 3)]
    for row in rows:
        assert row["val_top_three"] == pytest.approx(rows[0]["val_top_three"], abs=1e-6)
        assert row["val_order"] == rows[0]["val_order"]
        assert row["val_order"][:2] == [530, 530]
        assert row["val_difference"] == 1
        assert row.get("val_own", row["val_acc"]) == pytest.approx(row["val_acc"])
    assert rows[0]["val_acc"] < rows[0]["val_top_three"] < 1


@pytest.mark.neutral
def test_metrics_that_are_none(bench: Bench) -> None:
    for metrics, said in (
        ({"loss": top_three}, "cannot be called 'loss'"),
        ([top_three, top_three], "two metrics are called 'top_three'"),
        ({"mine": 3}, "metric 'mine' is of type int: give metrics="),
        ({"mine": Bench}, r"metric 'mine' is a class: make one, Bench\(\.\.\.\)"),
    ):
        with pytest.raises(BadSettings, match=said):
            bench.mh.Trainer(1, metrics=metrics)
    with pytest.raises(BadSettings, match="metrics= are computed over validation data: give some"):
        bench.fit(metrics=[top_three], data=bench.data()[0])


def broken(outputs: Any, targets: Any) -> float:
    raise ZeroDivisionError("nothing is positive")


def test_a_metric_that_fails_is_named(bench: Bench) -> None:
    X, y = bench.images(20)
    trainer = bench.mh.Trainer(1, metrics=[top_three, broken], **bench.on(1))
    said = (
        r"'broken' failed with ZeroDivisionError: nothing is positive. It was given outputs \(an array of shape \(20, "
    )
    with pytest.raises(MetricFailed, match=said) as caught:
        trainer.evaluate(bench.recipes.model("mlp", 0), (X, y))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# Evaluation and prediction


def test_a_loss_that_is_no_mean_is_that_of_whole_batches(bench: Bench) -> None:
    """In the order of the data, of the trainer's size or a loader's own; the same on any number of devices."""
    X, y = bench.images(50)
    model = bench.recipes.model("mlp", 0)
    scores = as_numpy(bench.mh.Trainer(1, quiet=True, **bench.on(1)).predict(model, X)).astype(np.float64)

    def mean_of(size: int) -> float:
        batches = [scores[start : start + size] for start in range(0, 50, size)]
        return sum(len(batch) * float(np.sqrt((batch**2).mean())) for batch in batches) / 50

    batches = [bench.arrays(X[start : start + 20], y[start : start + 20]) for start in (0, 20, 40)]
    assert mean_of(16) != pytest.approx(mean_of(20), rel=1e-5)
    for count in (1, 3):
        how: dict[str, Any] = {"quiet": True, "precision": "fp32", "loss": bench.own.root_loss, **bench.on(count)}
        trainer = bench.mh.Trainer(1, batch_size=16, metrics=[order], **how)
        found = trainer.evaluate(model, (X, y))
        assert found["loss"] == pytest.approx(mean_of(16), rel=1e-6)
        assert found["order"] == order(scores, y)
    assert trainer.evaluate(model, lambda: iter(batches))["loss"] == pytest.approx(mean_of(20), rel=1e-6)
    result = bench.mh.Trainer(1, batch_size=16, lr=0.0, **{**how, **bench.on(1)}).fit(model, (X, y), (X, y))
    assert result.rows[-1]["val_loss"] == pytest.approx(mean_of(16), rel=1e-6)


def test_predictions_are_the_models_answers_in_order(bench: Bench) -> None:
    X, y = bench.images(530)
    model = bench.recipes.model("mlp", 0)
    expected = bench.own.scores(model, bench.own.array(X))
    batches = [bench.own.array(X[start : start + 200]) for start in (0, 200, 400)]
    for count, forms in ((1, [(X, y)]), (3, [X, lambda: iter(batches)])):
        trainer = bench.mh.Trainer(1, quiet=True, precision="fp32", **bench.on(count))
        for data in forms:
            predicted = as_numpy(trainer.predict(model, data))
            assert predicted.shape == (530, 10)
            np.testing.assert_allclose(predicted, expected, atol=1e-5)


def test_evaluation_is_that_of_a_training(bench: Bench) -> None:
    """And the same on any number of devices; the model is left as it was."""
    train, validation = bench.data(samples=32, tested=530)
    how: dict[str, Any] = {"quiet": True, "precision": "fp32", "metrics": [top_three]}
    model = bench.recipes.model("mlp", 0)
    row = bench.mh.Trainer(1, lr=0.1, **how, **bench.on(1)).fit(model, train, validation).rows[-1]
    before = bench.scores(model, np.full((2, 28, 28), 100, np.uint8))
    for count in (1, 3):
        metrics = bench.mh.Trainer(1, **how, **bench.on(count)).evaluate(model, validation)
        assert list(metrics) == ["loss", "acc", "top_three"]
        for name, value in metrics.items():
            assert value == pytest.approx(row[f"val_{name}"], abs=1e-5)
    np.testing.assert_array_equal(bench.scores(model, np.full((2, 28, 28), 100, np.uint8)), before)


def test_what_predict_takes(bench: Bench) -> None:
    X, y = bench.images(20)
    trainer, model = bench.mh.Trainer(1, quiet=True, precision="fp32", **bench.on(1)), bench.recipes.model("mlp", 0)
    expected = as_numpy(trainer.predict(model, X))
    np.testing.assert_array_equal(as_numpy(trainer.predict(model, (X, y), targets=True)), expected)
    pairs = [(X[:10], y[:10]), (X[10:], y[10:])]
    for data in ([X[:10], X[10:]], [X, y], pairs):
        with pytest.raises(
            BadBatch, match=r"a list of 2 entries may be batches, or one data set: .*\(X, y\), for batch"
        ):
            trainer.predict(model, data)
    with pytest.raises(BadBatch, match="the data set is empty: it has no samples"):
        trainer.predict(model, X[:0])


def test_one_data_set_at_a_time(bench: Bench) -> None:
    trainer, model = bench.mh.Trainer(1, **bench.on(1)), bench.recipes.model("mlp", 0)
    with pytest.raises(
        BadBatch, match=r"evaluate takes one data set, and two were given: .*evaluate\(model, data\[1\]\)"
    ):
        trainer.evaluate(model, bench.data())
