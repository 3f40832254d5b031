"""Several processes on loopback train what one process trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from keras_cases import fit, mixed, mlp, tensors, unequal, vectors
from support import free_port

from manyhands.cli import parity
from manyhands.errors import BadSettings
from manyhands.training.launcher import LaunchedProcess
from manyhands.training.options import Step
from manyhands.training.tensorflow import world
from manyhands.training.tensorflow.trainer import Trainer

SCRIPT = """
import sys
from pathlib import Path
from keras_cases import mixed, mlp, momentum, tensors, unequal, vectors
import numpy as np
import tensorflow as tf
from manyhands import tensorflow as mh
from manyhands.errors import BadBatch
folder = Path(sys.argv[1])
trainer = mh.Trainer(1, lr=0.05, optimizer=momentum, quiet=True, step=mh.Step(shares=[3, 1]), run=folder / "run",
                     checkpoints=mh.Checkpoints(every=2), loss=unequal)
model = mixed()
if trainer_rank := int(__import__("os").environ["RANK"]):
    model.set_weights([0 * weight for weight in model.get_weights()])  # it gets those of the first process
data = tf.data.Dataset.from_tensor_slices(vectors(48))
result = trainer.fit(model, (data.shuffle(48).batch(16), vectors(9)))  # all have the order of the job's seed
np.savez(folder / f"{trainer_rank}.npz", **tensors(model))
(folder / f"{trainer_rank}.txt").write_text(f"{result.rows[-1]['samples']} {result.rows[-1]['val_loss']} {result}")
trainer = mh.Trainer(1, quiet=True, loss=unequal, metrics={"rows": lambda outputs, targets: len(outputs)})
metrics, outputs = trainer.evaluate(model, vectors(9)), trainer.predict(model, vectors(9)[0])
assert metrics["rows"] == 9, metrics
assert abs(metrics["loss"] - result.rows[-1]["val_loss"]) < 1e-5, metrics
if trainer_rank:
    assert outputs is None
else:
    np.testing.assert_allclose(outputs, model(vectors(9)[0], training=False), atol=1e-5)

try:
    mh.Trainer(1, quiet=True).fit(mlp(), data.skip(trainer_rank).batch(16))
except BadBatch as error:
    (folder / f"refused{trainer_rank}.txt").write_text(str(error))
"""


def start(folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    plain = {name: value for name, value in os.environ.items() if name != "MANYHANDS_VIRTUAL_DEVICES"}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env={**plain, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return said


def test_two_processes_train_what_one_process_trains(tmp_path: Path) -> None:
    port = str(free_port())
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ended([start(tmp_path, {"RANK": str(rank), **common}) for rank in range(2)])
    tf.random.set_seed(None)  # one that another test has left would seed the shuffle
    alone, data = mixed(), tf.data.Dataset.from_tensor_slices(vectors(48)).shuffle(48).batch(16)
    how = {"step": Step(shares=[3, 1]), "loss": unequal, "epochs": 1, "batch_size": None}
    result = fit(alone, (data, vectors(9)), 2, **how)
    for rank in range(2):
        found = dict(np.load(tmp_path / f"{rank}.npz"))
        assert parity.largest_difference(found, tensors(alone)) < 1e-5
        samples, loss, line = (tmp_path / f"{rank}.txt").read_text().split(" ", 2)
        assert samples == "48"
        assert float(loss) == pytest.approx(result.rows[-1]["val_loss"], rel=1e-5)
        assert "cpu of rank 1" in line
        refused = (tmp_path / f"refused{rank}.txt").read_text()
        assert re.search(r"different batches \(noticed after sample 16 of epoch 1", refused)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


def test_a_trainer_that_comes_after_the_model_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp()
    workers = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(BadSettings, match="make the Trainer first"):
        Trainer(1)
    assert os.environ["WORLD_SIZE"] == "2"


def test_several_machines_need_the_addresses_of_all_processes() -> None:
    with pytest.raises(BadSettings, match=r"1 of 2 processes are on this machine.*set TF_CONFIG"):
        world._resolver(LaunchedProcess(0, 2, 0, 1, "first.machine", 29500))


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"cluster": {"worker": []}, "task": {"index": 0}}', "[1]"])
def test_a_tf_config_that_cannot_be_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(BadSettings, match="TF_CONFIG"):
        world.read_tf_config()
