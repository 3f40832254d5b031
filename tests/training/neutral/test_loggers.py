"""Loggers write in a thread of their own: the training waits for them only before a checkpoint."""

from __future__ import annotations

import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import BadSettings, CallbackFailed, PackageMissing
from manyhands.training.callbacks.callback import Callback
from manyhands.training.callbacks.events import Dispatcher
from manyhands.training.callbacks.loggers import CSVLogger, Logger, MLflowLogger, TensorBoardLogger, WandbLogger
from manyhands.training.options import Settings

MISSING = {"wandb": WandbLogger, "mlflow": MLflowLogger, "tensorboardX": TensorBoardLogger}


def begun(callbacks: list[Callback], run: Path | None, step: int = 0, states: Any = None) -> Dispatcher:
    """A training that has begun, or continues after a step that ended an epoch."""
    dispatcher = Dispatcher(callbacks, Settings(max_epochs=3), run, quiet=True, first=True)
    place = {"epoch": 1, "step": step, "rows": [{"step": step}] if step else [], "batches": 4}
    dispatcher.event({"kind": "begin", "resumed": states is not None, "states": states, "asks": True, **place})
    return dispatcher


def steps(dispatcher: Dispatcher, step: int, loss: float) -> None:
    """The sums of an epoch after so many steps of one sample each."""
    sums = [loss * step, 0.0, float(step), False, {}]
    dispatcher.event({"kind": "steps", "epoch": 1, "step": step, "sums": sums, "rates": {}})


def row(dispatcher: Dispatcher, step: int, **metrics: float) -> None:
    row = {"epoch": 1, "step": step, "whole": True, **metrics}
    dispatcher.event({"kind": "epoch", "epoch": 1, "step": step, "row": row, "sums": [0.0, 0.0, 0.0, False, {}]})


class Slow(Logger):
    """Waits until it may write."""

    def __init__(self) -> None:
        super().__init__(every=1)
        self.may_write = threading.Event()
        self.written: list[int] = []

    def write_steps(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        assert self.may_write.wait(60)
        self.written.append(step)


def test_steps_do_not_wait_and_a_checkpoint_does() -> None:
    slow = Slow()
    with begun([slow], None) as dispatcher:
        for step in range(1, 100):
            steps(dispatcher, step, 1.0)  # would never return if it waited
        assert not slow.written
        threading.Timer(0.05, slow.may_write.set).start()
        dispatcher.event({"kind": "states", "asks": True})
        assert slow.written == list(range(1, 100))


class Full(Logger):
    def __init__(self, error: Exception) -> None:
        super().__init__(every=1)
        self.error = error

    def flush(self) -> None:
        raise self.error


def test_a_full_disk_is_a_warning_and_another_error_ends_the_training() -> None:
    with begun([full()], None) as dispatcher:
        steps(dispatcher, 1, 1.0)
        with pytest.warns(UserWarning, match="Full could not write: No space left"):
            dispatcher.event({"kind": "states", "asks": True})
    with begun([Full(ValueError("no"))], None) as dispatcher:
        steps(dispatcher, 1, 1.0)
        with pytest.raises(CallbackFailed, match=r"Full failed in state_dict .*ValueError: no"):
            dispatcher.event({"kind": "states", "asks": True})


def full() -> Full:
    return Full(OSError(28, "No space left on device"))


def test_a_table_gets_new_columns_and_loses_a_torn_line(tmp_path: Path) -> None:
    with begun([CSVLogger()], tmp_path) as dispatcher:
        row(dispatcher, 4, train_loss=0.5)
        row(dispatcher, 8, train_loss=0.25, val_f1=0.75)
    table = tmp_path / "metrics.csv"
    assert table.read_text() == "epoch,step,train_loss,val_f1\n1,4,0.5,\n1,8,0.25,0.75\n"
    with table.open("a") as file:
        file.write("1,12,0.1")
    with begun([CSVLogger()], tmp_path, step=4, states={"states": {}, "offsets": {}}) as dispatcher:
        row(dispatcher, 8, train_loss=0.125)
    assert table.read_text() == "epoch,step,train_loss,val_f1\n1,4,0.5,\n1,8,0.125,\n"
    assert not (tmp_path / "steps.csv").exists()


def test_nothing_is_written_before_there_are_figures(tmp_path: Path) -> None:
    with begun([CSVLogger(every=1), TensorBoardLogger()], tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_logger_needs_a_folder() -> None:
    with pytest.raises(BadSettings, match=r"CSVLogger has no folder to write to: give Trainer\(run=...\), or folder="):
        begun([CSVLogger()], None)


def records(folder: Path) -> list[Any]:
    """The events in TensorBoard's files, oldest first: a length (8 bytes), a checksum (4), the event, a checksum."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_tensorboard(tmp_path: Path) -> None:
    with begun([TensorBoardLogger(every=2)], tmp_path) as dispatcher:
        steps(dispatcher, 2, 0.5)
        row(dispatcher, 4, train_loss=0.25, val_acc=0.75)
        dispatcher.event({"kind": "states", "asks": True})
        scalars = [
            (event.step, value.tag, value.simple_value)
            for event in records(tmp_path / "tensorboard")
            for value in event.summary.value
        ]
    names = [(2, "step/train_loss", 0.5), (4, "epoch", 1.0), (4, "train_loss", 0.25), (4, "val_acc", 0.75)]
    assert scalars == names, "all that was logged before a checkpoint is in the file"
    with begun([TensorBoardLogger()], tmp_path, step=2, states={"states": {}, "offsets": {}}) as dispatcher:
        row(dispatcher, 4, train_loss=0.125)
    purged = [event.step for event in records(tmp_path / "tensorboard") if event.HasField("session_log")]
    assert purged == [3]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_package_is_a_lesson(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(PackageMissing, match=f"pip install {name}"):
        begun([MISSING[name]()], tmp_path)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger("tests", mode="offline", every=2)
    with begun([logger], tmp_path) as dispatcher:
        steps(dispatcher, 2, 0.5)
        row(dispatcher, 4, train_loss=0.25)
        states = dispatcher.event({"kind": "states", "asks": True})
    assert states["states"]["WandbLogger"]["id"]
    assert wandb.run is None
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = f"file:{tmp_path / 'mlflow'}"
    with begun([MLflowLogger("tests", tracking_uri=where, every=2)], None) as dispatcher:
        steps(dispatcher, 2, 0.5)
        row(dispatcher, 4, train_loss=0.25)
        states = dispatcher.event({"kind": "states", "asks": True})
    client = mlflow.MlflowClient(tracking_uri=where)
    run = client.get_run(states["states"]["MLflowLogger"]["id"])
    assert run.data.metrics == {"step/train_loss": 0.5, "epoch": 1.0, "train_loss": 0.25}
    assert run.info.status == "FINISHED"


def test_a_logger_of_your_own(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Mine(Logger):
        def write_row(self, epoch: int, step: int, metrics: dict[str, Any]) -> None:
            seen.append((epoch, step, metrics))

    with begun([Mine()], tmp_path) as dispatcher:
        row(dispatcher, 4, train_loss=0.25)
    assert seen == [(1, 4, {"train_loss": 0.25})]
