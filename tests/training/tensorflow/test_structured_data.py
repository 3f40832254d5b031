"""Dicts of features, several outputs and sample weights, as ``model.fit`` takes them, on any number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_cases import momentum, tensors

from manyhands import tensorflow as mh
from manyhands.cli import parity
from manyhands.errors import BadBatch, BadSettings
from manyhands.training.options import Step

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
