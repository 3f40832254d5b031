"""What people type: devices as a text or a number, losses and optimizers by name and as classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_bench import MOST, Bench

from manyhands.errors import BadDevice, NoSuchDevice


def names(bench: Bench, devices: Any) -> list[str]:
    return bench.mh.Trainer(1, devices=devices).device_names


def test_devices_as_a_text_or_a_number(bench: Bench) -> None:
    made = [f"virtual:{number}" for number in range(MOST)]
    assert names(bench, "cpu:2") == names(bench, 2) == names(bench, "2") == made[:2]
    assert names(bench, made[:2]) == names(bench, ",".join(made[:2])) == made[:2], "as they are printed"
    assert names(bench, "cpu") == names(bench, "cpu:1") == names(bench, ["cpu"]) == names(bench, ["CPU:0"]) == ["cpu"]
    assert bench.mh.Trainer(1, num_gpus=0).device_names == ["cpu"]
    # Virtual devices stand in for GPUs; PyTorch has none here, as most machines without a GPU.
    assert names(bench, "gpu") == names(bench, "all") == (["cpu"] if bench.framework == "torch" else made)
    for wrong in ("tpu", 0):
        with pytest.raises(BadDevice, match="devices="):
            names(bench, wrong)
    with pytest.raises(NoSuchDevice, match="devices='gpu:99': there is no gpu:99 here"):
        names(bench, "gpu:99")


@pytest.mark.neutral
def test_the_same_text_is_the_same_job(bench: Bench) -> None:
    """``devices="cpu:2"`` trains, and its run is the one of ``--devices cpu:2``."""
    options: dict[str, Any] = {"optimizer": "adamw", "lr": 0.01, "precision": "fp32", "quiet": True}
    trainer = bench.mh.Trainer(1, devices="cpu:2", **options)
    result = trainer.fit(bench.recipes.model("mlp", 0), bench.data())
    assert result.devices == ["virtual:0", "virtual:1"]
    again = bench.fit(2, epochs=1, optimizer="adamw", lr=0.01)
    # Sums over devices may be in another order.
    assert result.rows[-1]["train_loss"] == pytest.approx(again.rows[-1]["train_loss"], rel=1e-5)


def test_losses_by_name_and_as_classes(bench: Bench) -> None:
    """ "mse" is the same number in every framework, also where its own class is another one."""
    random = np.random.RandomState(0)
    images = random.randint(0, 256, (32, 28, 28)).astype(np.uint8)
    y = random.normal(size=(32, 10)).astype(np.float32)
    model = bench.recipes.model("mlp", 0)
    errors = bench.scores(model, images) - y
    X = bench.in_layout(images.astype(np.float32) / 255)
    meant = [("mse", (errors**2).mean()), ("mae", np.abs(errors).mean()), ("L1", np.abs(errors).mean())]
    meant += [(loss, times * (errors**2).mean()) for loss, times in bench.own.squares]
    for loss, value in meant:
        trainer = bench.mh.Trainer(1, batch_size=16, lr=0.0, loss=loss, quiet=True, precision="fp32", devices="cpu")
        assert trainer.fit(bench.recipes.model("mlp", 0), (X, y)).rows[-1]["train_loss"] == pytest.approx(value, 1e-4)
