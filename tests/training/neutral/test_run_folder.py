"""The folder of a run: one per run, and what is in it survives a kill."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import BadRunFolder, ManyhandsError, NotJson, RunInUse
from manyhands.training.checkpoints.run_folder import RunFolder

ROWS = [{"step": step, "epoch": step / 4, "train_loss": 1 / step, "note": "ä\n", "val_acc": None} for step in (1, 2, 3)]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs", "mine")
    for row in ROWS:
        assert run.add_row(row) is None
    return run


def test_processes_at_once_never_share(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from manyhands.training.checkpoints.run_folder import RunFolder\n"
        "for _ in range(50): print(RunFolder.create(Path(sys.argv[1]), 'same').path.name)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    taken = [name for process in processes for name in process.communicate()[0].split()]
    assert len(taken) == len(set(taken)) == 100


# Settings


def test_settings_that_cannot_be_written_leave_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path)
    run.config = {"model": "lenet", "devices": ["cpu:0", "cpu:1"]}
    run.config = {"lr": 0.1}
    with pytest.raises(NotJson, match=r"config\['lr'\] is nan"):
        run.config = {"lr": math.nan}

    def no_space(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        run.config = {"lr": 0.2}
    assert run.config == {"lr": 0.1}
    assert [path.name for path in run.path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"lr": NaN}', "\0" * 10])
def test_damaged_settings_are_named(tmp_path: Path, text: str) -> None:
    run = RunFolder.create(tmp_path)
    run.config_path.write_text(text)
    with pytest.raises(BadRunFolder, match=r"config\.json") as caught:
        RunFolder.open(run.path).config  # noqa: B018
    assert isinstance(caught.value, ManyhandsError)


def test_open_wants_a_run(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match="no such folder"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(BadRunFolder, match=r"no config\.json"):
        RunFolder.open(tmp_path)
    with pytest.raises(BadRunFolder, match="missing"):
        RunFolder.create(tmp_path).config  # noqa: B018


# Metrics


def test_rows_come_back_in_order(run: RunFolder) -> None:
    assert run.metrics() == RunFolder(run.path).metrics() == ROWS
    assert len(run.metrics_path.read_bytes().splitlines()) == 3
    run.truncate_metrics(2)
    assert run.metrics() == ROWS[:2]


def test_what_is_not_a_number_becomes_null(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    run.add_row({"step": 1, "loss": math.nan, "scale": math.inf})
    assert run.metrics() == [{"step": 1, "loss": None, "scale": None}]
    with pytest.raises(NotJson, match=r"row\['loss'\]"):
        run.add_row({"step": 2, "loss": object()})


def test_a_full_disk_loses_no_row(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    assert "metrics of epoch 2 could not be written" in str(run.add_row({"step": 4, "epoch": 2}))
    assert run.metrics() == ROWS
    assert len(run.unwritten) == 1
    monkeypatch.undo()
    assert run.add_row({"step": 5, "epoch": 3}) is None
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4, 5]
    assert not run.unwritten


def test_an_edited_line_is_named(run: RunFolder) -> None:
    for line in (b"oops", b"[1]", b'{"epoch": 1}'):
        run.metrics_path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
        with pytest.raises(BadRunFolder, match=r"metrics\.jsonl was changed"):
            run.metrics()


# The lock


def test_a_folder_is_locked_once_and_free_again(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    assert first.lock() is None
    assert first.lock() is None, "by the same run: it holds it already"
    with pytest.raises(RunInUse, match=f"process {os.getpid()} on "):
        second.lock()
    first.release()
    assert list(tmp_path.iterdir()) == []
    second.lock()
    second.release()


FORKED = """
import os, signal, sys, time
from pathlib import Path
from manyhands.training.checkpoints.run_folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
run.lock()
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(600)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_lock_of_a_killed_process_does_not_stay_with_its_children(tmp_path: Path) -> None:
    """A data loader's workers are forked, and live for some seconds after their parent was killed."""
    killed = subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], stdout=subprocess.PIPE, check=False)
    child = int(killed.stdout)
    try:
        RunFolder(tmp_path).lock()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def unsupported(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    run = RunFolder(tmp_path)
    assert "could not be locked (No locks available)" in str(run.lock())
    run.release()
    assert list(tmp_path.iterdir()) == []
