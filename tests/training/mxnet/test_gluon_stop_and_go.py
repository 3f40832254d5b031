"""Stopped at any moment and resumed, a job is the same; on another number of devices: the contract suite."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mxnet.ndarray", reason="MXNet is not installed")

import mxnet as mx
import numpy as np
from gluon_cases import fit, mlp, rows, same, vectors
from mxnet.gluon import nn
from safetensors.numpy import load
from support import as_if_killed

from manyhands.training.checkpoints import store, tensors
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.mxnet import replicas
from manyhands.training.mxnet.trainer import Trainer
from manyhands.training.options import Checkpoints

STEPS = 12  # of 96 samples in batches of 16, in two epochs


def with_dropout(devices: int, run: Path | None, optimizer: Any = "adam", **options: Any) -> Any:
    given = {
        "run": run,
        "optimizer": optimizer,
        "checkpoints": Checkpoints(every=1 if run else None, keep=100),
        **options,
    }
    if isinstance(optimizer, str):
        given.setdefault("lr", 0.01)
    return fit(mlp(dropout=0.5, norm=True), (vectors(96), vectors(20)), devices, **given)


@pytest.mark.parametrize("devices", [1, 2])
def test_resumed_on_as_many_devices_all_is_the_same(tmp_path: Path, devices: int) -> None:
    """In the middle of an epoch, exactly at its end, in the next one; dropout and Adam included: bit by bit."""
    whole, expected = with_dropout(devices, tmp_path / "whole")
    for step in (STEPS // 2, 8):
        killed = as_if_killed(tmp_path / "whole", step)
        resumed, result = with_dropout(devices, killed, resume="auto")
        assert same(whole, resumed)
        assert rows(result) == rows(expected)
        assert [row["epoch"] for row in RunFolder.open(killed).metrics()] == [1, 2]


@pytest.mark.parametrize("optimizer", ["nag", "nadam"])
def test_the_state_of_optimizers(tmp_path: Path, optimizer: str) -> None:
    """What each of them remembers goes to the checkpoint as plain arrays; without a folder the job is the same."""
    made = mx.optimizer.create(optimizer, learning_rate=0.01, **({"momentum": 0.9} if optimizer == "nag" else {}))
    with_dropout(1, tmp_path / "run", made)
    killed = as_if_killed(tmp_path / "run", 7)
    expected, _ = with_dropout(1, None, made)
    assert same(with_dropout(1, killed, made, resume="auto")[0], expected)
    arrays = load(store.load(killed / "checkpoints").blobs["optimizer"])
    assert len(arrays) == 6 * (2 if optimizer == "nadam" else 1)


def test_convolutions(tmp_path: Path) -> None:
    """oneDNN lays their weights out anew in a forward pass, as in the trial on a few samples before the job begins."""
    generator = np.random.default_rng(0)
    data = generator.random((16, 1, 9, 9), dtype=np.float32), generator.integers(10, size=16)

    def train(run: Path, epochs: int, **options: Any) -> Any:
        net = nn.HybridSequential()
        net.add(nn.Conv2D(16, 3), nn.Conv2D(16, 3), nn.Dense(10))
        mx.random.seed(1)
        net.initialize()
        result = Trainer(epochs, batch_size=8, precision="fp32", quiet=True, run=run, **options).fit(net, data)
        return replicas.model_tensors(net), result

    whole, _ = train(tmp_path / "whole", 2)
    train(tmp_path / "run", 1)
    assert same(train(tmp_path / "run", 2, resume="auto")[0], whole)


def test_a_checkpoint_without_an_optimizer_begins_with_a_fresh_one(tmp_path: Path) -> None:
    """As one converted from another framework: only the weights."""
    weights, _ = fit(mlp(), vectors(), 1, max_epochs=1, run=tmp_path / "run", optimizer="adam")
    found = store.load(tmp_path / "run" / "checkpoints")
    kept = {**found.state, "optimizer_type": None}
    del kept["optimizer"], kept["devices"], kept["world"]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    store.save(tmp_path / "run" / "checkpoints", found.step, kept, {"model": found.blobs["model"]})
    begun = mlp()
    replicas.restore_model(begun, tensors.pack(weights))
    again, _ = fit(mlp(), vectors(), 2, run=tmp_path / "run", resume="auto", optimizer="adam")
    assert not same(again, weights)
