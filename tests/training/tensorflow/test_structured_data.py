"""Dicts of features, several outputs and sample weights, as ``model.fit`` takes them, on any number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_cases import fit, mlp, momentum, tensors, vectors
from support import StopAt, Stopped, same_rate

from manyhands import tensorflow as mh
from manyhands.cli import parity
from manyhands.errors import BadBatch, BadSettings
from manyhands.training.options import Checkpoints, Step
from manyhands.training.tensorflow.dataset import repeatable

COUNT, BATCH = 24, 8
random = np.random.RandomState(5)
FEATURES = {"age": random.normal(size=(COUNT, 1)), "words": random.normal(size=(COUNT, 4))}
PRICE, KIND = random.normal(size=(COUNT, 1)), random.randint(0, 3, COUNT)
WEIGHTS = {"price": random.uniform(size=COUNT), "kind": random.uniform(size=COUNT)}
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
LOSSES = {"price": keras.losses.MeanSquaredError(dtype="float64"), "kind": SPARSE}


def model(outputs: str = "dict") -> Any:
    keras.config.set_dtype_policy("float64")
    try:
        inputs = {"age": layers.Input((1,), name="age"), "words": layers.Input((4,), name="words")}
        hidden = layers.Concatenate()([inputs["age"], layers.Dense(3, activation="tanh")(inputs["words"])])
        price, kind = layers.Dense(1, name="price")(hidden), layers.Dense(3, name="kind")(hidden)
        made = keras.Model(
            inputs, {"dict": {"price": price, "kind": kind}, "list": [price, kind], "one": kind}[outputs]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    for number, weight in enumerate(made.weights):
        weight.assign(np.random.RandomState(number).normal(size=weight.shape))
    return made


def in_batches(data: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH)


def trained(data: Any, outputs: str = "dict", devices: int = 1, epochs: int = 2, **how: Any) -> tuple[Any, Any]:
    net = model(outputs)
    if "loss" not in how:
        net.compile(momentum(0.05), **how.pop("compiled"))
    else:
        how["optimizer"] = momentum(0.05)
    if devices > 1:
        how["step"] = Step(shares=[2, 1] if devices == 2 else [4, 2, 1], **how.pop("of_step", {}))
    names = [f"virtual:{i}" for i in range(devices)]
    return net, mh.Trainer(epochs, devices=names, quiet=True, **how).fit(net, data)


TARGETS = {"price": PRICE, "kind": KIND}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "dicts": ("dict", (FEATURES, TARGETS), {"loss": LOSSES, "loss_weights": {"price": 0.5, "kind": 2.0}}),
    "weights of each output": ("dict", (FEATURES, TARGETS, WEIGHTS), {"loss": LOSSES}),
    "lists": (
        "list",
        (FEATURES, (PRICE, KIND), WEIGHTS["kind"]),
        {"loss": ["mse", SPARSE], "loss_weights": [0.5, 2.0]},
    ),
    "names for a list": ("list", (FEATURES, TARGETS), {"loss": {"price": "mae", "kind": SPARSE}}),
    "one of two losses": ("dict", (FEATURES, TARGETS), {"loss": {"kind": SPARSE}}),
}
DEVICES = {"dicts": 3, "weights of each output": 2, "lists": 2}  # else one


@pytest.mark.parametrize("case", CASES)
def test_the_update_and_the_loss_are_those_of_keras_on_any_number_of_devices(case: str) -> None:
    outputs, data, compiled = CASES[case]
    by_keras = model(outputs)
    by_keras.compile(momentum(0.05), **compiled)
    shown = by_keras.fit(in_batches(data), epochs=2, verbose=0).history["loss"]
    net, result = trained(in_batches(data), outputs, DEVICES.get(case, 1), compiled=compiled)
    assert [row["train_loss"] for row in result.rows] == pytest.approx(shown, rel=1e-5)
    assert parity.largest_difference(tensors(net), tensors(by_keras)) < 1e-5


def test_arrays_in_dicts_are_shuffled_resumed_and_validated_as_others(tmp_path: Path) -> None:
    """On two devices in micro-batches, with a stop between the epochs; and on one."""
    data, compiled = (FEATURES, TARGETS, WEIGHTS), {"loss": LOSSES}
    alone, first = trained((data, data), compiled=compiled, batch_size=12)
    how: dict[str, Any] = {"devices": 2, "compiled": compiled, "batch_size": 12, "run": tmp_path / "run"}
    trained((data, data), epochs=1, **how, of_step={"accumulate": 2})
    resumed, second = trained((data, data), **how, of_step={"accumulate": 2}, resume="auto")
    assert second.rows[-1]["val_loss"] == pytest.approx(first.rows[-1]["val_loss"], rel=1e-9)
    assert parity.largest_difference(tensors(resumed), tensors(alone)) < 1e-9


@pytest.mark.parametrize(("outputs", "noted"), [("list", True), ("one", False)])
def test_accuracy_of_several_outputs_is_not_left_out_in_silence(outputs: str, noted: bool) -> None:
    targets, losses = ((PRICE, KIND), ["mse", SPARSE]) if noted else (KIND, SPARSE)
    metrics = [[], ["accuracy"]] if noted else ["accuracy"]
    _, result = trained(in_batches((FEATURES, targets)), outputs, compiled={"loss": losses, "metrics": metrics})
    assert (result.rows[0]["train_acc"] is None) == noted
    assert any("metrics of model.compile" in note for note in result.notes) == noted


def test_what_does_not_fit_the_outputs_is_named() -> None:
    with pytest.raises(BadSettings, match=r"(?s)does not fit the model's outputs and targets: .*cost"):
        trained((FEATURES, {"cost": PRICE}), "list", loss=["mse", SPARSE])
    good, bad = (FEATURES, KIND), ({"age": FEATURES["age"]}, KIND)
    with pytest.raises(BadBatch, match="the one before it"):
        mh.Trainer(1, quiet=True, loss=SPARSE).fit(model("one"), [good, good, bad])


def test_predictions_of_inputs_by_name() -> None:
    """Without targets, with them, and in the batches of a data set: what the model itself gives."""
    net, trainer = model(), mh.Trainer(devices=["virtual:0", "virtual:1"], quiet=True, batch_size=BATCH)
    expected = {name: np.asarray(one) for name, one in net(FEATURES).items()}
    targets = {"price": PRICE, "kind": KIND}
    batches = in_batches(FEATURES)
    for data in (
        FEATURES,
        (FEATURES, targets),
        [FEATURES["age"], FEATURES["words"]],
        batches,
        in_batches((FEATURES, targets)),
    ):
        outputs = trainer.predict(net, data)
        for name, values in expected.items():
            np.testing.assert_allclose(outputs[name], values, rtol=1e-12)


# A tf.data.Dataset that shuffles has an order that the job's seed and the epoch decide


@pytest.fixture(autouse=True)
def _no_global_seed() -> None:
    """A global seed, which another test may have left, seeds every shuffle."""
    tf.random.set_seed(None)


def orders(dataset: Any, epochs: list[int], seed: int = 0) -> list[list[int]]:
    loader, found = repeatable(dataset, seed), []
    for epoch in epochs:
        loader.set_epoch(epoch)
        found.append([int(number) for batch in loader for number in batch.numpy()])
    return found


def test_the_order_of_an_epoch_does_not_depend_on_what_was_read_before() -> None:
    numbers = tf.data.Dataset.range(12)
    seeded = numbers.shuffle(12, seed=3).batch(5).prefetch(1)
    fresh = [[int(number) for batch in seeded for number in batch.numpy()] for _ in range(3)]
    assert orders(seeded, [0, 1, 2, 1, 0]) == [*fresh, fresh[1], fresh[0]]
    for dataset in (numbers.shuffle(12).batch(5), numbers.shuffle(12).repeat(2).batch(5)):
        in_order = orders(dataset, [0, 1, 2])
        assert len({tuple(order) for order in in_order}) == 3
        assert orders(dataset, [2]) == in_order[2:] != orders(dataset, [2], seed=1)
    once = orders(numbers.shuffle(12, reshuffle_each_iteration=False).batch(5), [0, 1])
    assert once[0] == once[1]
    assert repeatable(numbers.batch(5), 0) is not None
    assert isinstance(repeatable(numbers.batch(5), 0), tf.data.Dataset)


def shuffled(seed: int | None = None) -> Any:
    def doubled(x: Any, y: Any) -> Any:
        return 2 * x, y

    return tf.data.Dataset.from_tensor_slices(vectors()).shuffle(50, seed=seed).map(doubled).batch(8).prefetch(2)


def test_a_stopped_job_goes_on_at_the_very_batch(tmp_path: Path) -> None:
    how: dict[str, Any] = {"batch_size": None, "checkpoints": Checkpoints(every=2)}
    whole, stopped, resumed = mlp(), mlp(), mlp()
    fit(whole, shuffled(), 2, run=tmp_path / "whole", schedule=same_rate, **how)
    with pytest.raises(Stopped):
        fit(stopped, shuffled(), 2, run=tmp_path / "run", schedule=StopAt(12), **how)
    fit(resumed, shuffled(), 2, run=tmp_path / "run", resume="auto", schedule=same_rate, **how)
    for one, other in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_dataset_without_an_end_goes_on_from_epoch_to_epoch() -> None:
    numbers = tf.data.Dataset.range(10)
    for dataset in (numbers.repeat().batch(3), numbers.shuffle(10).repeat().batch(3)):
        loader = repeatable(dataset, 0, 4)
        found = []
        for epoch in (0, 1, 2, 1):
            loader.set_epoch(epoch)
            found.append([int(number) for batch in loader for number in batch.numpy()])
        assert [len(order) for order in found] == [12, 12, 12, 12]
        assert found[1] == found[3]
        passes = np.reshape(np.concatenate(found[:3])[:30], (3, 10))
        assert (np.sort(passes, 1) == np.arange(10)).all()
