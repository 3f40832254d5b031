"""The folder of a run: one per run, and what is in it survives a kill."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from manyhands import files
from manyhands.errors import BadRunFolder, ManyhandsError, NotJson, RunInUse
from manyhands.training.checkpoints.run_folder import RunFolder

ROWS = [{"step": step, "epoch": step / 4, "train_loss": 1 / step, "note": "ä\n", "val_acc": None} for step in (1, 2, 3)]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "runs", "mine")
    for row in ROWS:
        run.append_metrics(row)
    return run


def test_the_places_in_a_run(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "deep" / "runs")
    assert run.path.is_dir()
    assert run.path.parent == tmp_path / "deep" / "runs"
    assert run.checkpoints == run.path / "checkpoints"
    assert run.plot_path == run.path / "curves.png"
    assert str(run.path) in repr(run)


def test_the_default_place_is_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunFolder.create().path.parent == Path("runs")


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    assert [RunFolder.create(tmp_path, "a").path.name for _ in range(3)] == ["a", "a-2", "a-3"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "a\\b", "a\0"])
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRunFolder, match="name="):
        RunFolder.create(tmp_path, name)


def test_threads_at_once_never_share(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunFolder.create(tmp_path), range(40)))
    assert len({run.path for run in runs}) == 40


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


def test_settings_are_written_and_read(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    run.config = {"model": "lenet", "lr": 0.1, "devices": ["cpu:0", "cpu:1"]}
    run.config = {**run.config, "lr": 0.2}
    assert RunFolder.open(run.path).config == {"model": "lenet", "lr": 0.2, "devices": ["cpu:0", "cpu:1"]}
    assert [path.name for path in run.path.iterdir()] == ["config.json"]


def test_what_a_step_was_is_kept_in_words(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    run.write_step("a batch of 256: in one CUDA graph")
    run.write_step("a batch of 96: in one CUDA graph")
    assert run.step_path.read_text() == "a batch of 96: in one CUDA graph\n"


def test_settings_that_cannot_be_written_leave_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path)
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


# Figures


def test_rows_come_back_in_order(run: RunFolder) -> None:
    assert run.metrics() == ROWS
    assert len(run.metrics_path.read_bytes().splitlines()) == 3
    assert RunFolder(run.path).metrics() == ROWS


def test_no_rows_yet(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    assert run.metrics() == []
    run.truncate_metrics(0)
    assert not run.metrics_path.exists()


def test_a_row_is_with_the_system_at_once(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from manyhands.training.checkpoints.run_folder import RunFolder\n"
        "RunFolder(Path(sys.argv[1])).append_metrics({'step': 1}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert RunFolder(tmp_path).metrics() == [{"step": 1}]


def test_what_is_not_a_number_becomes_null(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    run.append_metrics({"loss": math.nan, "scale": math.inf})
    assert run.metrics() == [{"loss": None, "scale": None}]
    with pytest.raises(NotJson, match=r"row\['loss'\]"):
        run.append_metrics({"loss": object()})  # type: ignore[dict-item]
    assert len(run.metrics()) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(cut=5, rubbish=b"\r0")
@given(cut=st.integers(min_value=0), rubbish=st.binary(max_size=3).filter(lambda text: b"\n" not in text))
def test_a_torn_last_line_is_ignored_and_repaired(tmp_path: Path, cut: int, rubbish: bytes) -> None:
    run = RunFolder.create(tmp_path)
    for row in ROWS:
        run.append_metrics(row)
    data = run.metrics_path.read_bytes()
    data = data[: cut % (len(data) + 1)]
    whole = data.count(b"\n")
    run.metrics_path.write_bytes(data + (rubbish if not data.endswith(b"}") else b""))
    again = RunFolder(run.path)
    assert again.metrics() == ROWS[:whole]
    again.append_metrics({"step": 99})
    assert again.metrics() == [*ROWS[:whole], {"step": 99}]


def test_a_last_line_of_zeros_is_ignored_and_repaired(run: RunFolder) -> None:
    with open(run.metrics_path, "ab") as file:
        file.write(bytes(50) + b"\n")
    again = RunFolder(run.path)
    assert again.metrics() == ROWS
    again.append_metrics({"step": 99})
    assert again.metrics() == [*ROWS, {"step": 99}]


def test_a_full_disk_while_appending_is_repaired(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    def half(path: Any, mode: str = "r") -> Any:
        if mode == "ab":
            with real(path, mode) as file:
                file.write(b'{"step": 4, "tr')
            raise OSError(28, "No space left on device")
        return real(path, mode)

    real = builtins.open
    monkeypatch.setattr(builtins, "open", half)
    with pytest.raises(OSError, match="No space left"):
        run.append_metrics({"step": 4, "train_loss": 0.1})
    monkeypatch.undo()
    assert run.metrics() == ROWS
    run.append_metrics({"step": 5})
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 5]


def test_an_edited_line_in_the_middle_is_named(run: RunFolder) -> None:
    run.metrics_path.write_bytes(b'{"step": 1}\noops\n{"step": 3}\n')
    with pytest.raises(BadRunFolder, match=r"metrics\.jsonl, line 2"):
        run.metrics()


def test_going_back_drops_the_rows_of_later_steps(run: RunFolder) -> None:
    run.append_metrics({"note": "no step"})
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"torn')
    run.truncate_metrics(2)
    assert run.metrics() == [*ROWS[:2], {"note": "no step"}]
    run.append_metrics({"step": 3})
    assert run.metrics()[-1] == {"step": 3}


def test_replace_leaves_no_temporary_files(tmp_path: Path) -> None:
    files.replace(tmp_path / "file", b"1")
    files.replace(tmp_path / "file", b"2")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"2"


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
