"""What is shown of a run: the picture of its curves, and its progress."""

from __future__ import annotations

import doctest
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import PackageMissing
from manyhands.training.callbacks import display
from manyhands.training.callbacks.callback import Training
from manyhands.training.callbacks.display import Picture, _figure, curves
from manyhands.training.result import Result

ROWS: list[dict[str, Any]] = [
    {"epoch": 0.5, "train_loss": 2.0, "train_acc": 0.4},
    {"epoch": 1.0, "train_loss": 1.0, "train_acc": 0.7, "val_loss": 1.2, "val_acc": 0.6},
    {"epoch": 1.5, "train_loss": None, "train_acc": float("nan")},
    {"epoch": 2.0, "train_loss": 0.5, "train_acc": 0.9, "val_loss": 0.75, "val_acc": 0.8, "note": "text"},
]


def test_the_picture_has_loss_and_accuracy_of_both_parts() -> None:
    pytest.importorskip("matplotlib")
    figure = _figure(ROWS, "a title")
    left, right = figure.axes
    drawn = {line.get_label(): line for axes in (left, right) for line in axes.get_lines()}
    assert {label: line.get_linestyle() for label, line in drawn.items()} == {
        "train loss 0.5": "-",
        "val loss 0.75": "--",
        "train acc 0.900": "-",
        "val acc 0.800": "--",
    }
    assert list(drawn["train loss 0.5"].get_xdata()) == [0.5, 1.0, 2.0]
    assert list(drawn["val acc 0.800"].get_ydata()) == [0.6, 0.8]
    assert left.get_ylim()[0] == 0.0
    assert right.get_ylim() == (0.0, 1.0)
    assert (left.get_xlabel(), left.get_ylabel(), right.get_ylabel()) == ("epoch", "loss", "accuracy")
    assert left.get_title() == "a title"


def test_a_regression_has_no_accuracy() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = _figure([{"epoch": 1, "train_loss": 0.5, "train_acc": None, "val_loss": 0.7, "val_acc": None}], "").axes
    assert [line.get_label() for line in axes.get_lines()] == ["train loss 0.5", "val loss 0.7"]
    assert [line.get_marker() for line in axes.get_lines()] == ["o", "o"], "a single epoch is a picture, too"
    assert axes.get_xlim() == (0.0, 2.0)


def test_rows_within_epochs_are_drawn_over_steps() -> None:
    pytest.importorskip("matplotlib")
    rows = [{"epoch": 1, "step": 50, "val_loss": 0.5}, {"epoch": 1, "step": 80, "val_loss": 0.4}]
    (axes,) = _figure(rows, "").axes
    assert axes.get_xlabel() == "step"
    assert list(axes.get_lines()[0].get_xdata()) == [50, 80]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        [],
        [{"epoch": 1.0, "train_loss": -3.0}, {"epoch": 2.0, "train_loss": 1e30}],
        [{"train_loss": 1.0}],
        [{"epoch": index / 50, "train_loss": 1.0, "train_acc": 1.0} for index in range(200)],
    ],
)
@pytest.mark.filterwarnings("error")
def test_any_rows_give_a_picture(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    path = curves(rows, tmp_path / "new" / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["curves.png"]


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PackageMissing, match=r"pip install matplotlib") as caught:
        curves(ROWS, tmp_path / "curves.png")
    assert isinstance(caught.value, ImportError)


# Progress


def started(max_epochs: int) -> tuple[display.Progress, Training]:
    shown, training = display.Progress(), Training(max_epochs)
    shown.on_fit_start(training)
    training.epoch, training.batches = 1, 25
    return shown, training


@pytest.mark.parametrize("stream", ["log", "closed", None])
def test_a_log_gets_lines_and_no_bar(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed log, and none at all, do not stop the training."""
    log = None if stream is None else io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    shown, training = started(2)
    if log is not None and stream == "closed":
        log.close()
    for batch in range(1, 6):
        shown.on_progress(training, {"batch": batch, "samples": batch, "loss": 1 / batch})
    for _ in range(2):
        shown.on_note(training, "a [bold] line")
    shown.on_fit_end(training)
    assert stream != "log" or log.getvalue() == "a [bold] line\n" * 2  # type: ignore[union-attr]


ON_A_TERMINAL = """
import time
from manyhands.training.callbacks.callback import Training
from manyhands.training.callbacks.display import Progress

training, shown = Training(10), Progress()
shown.on_fit_start(training)
training.epoch, training.batches = 3, 2000
shown.on_epoch_start(training)
for batch in (1, 1000, 2000):
    time.sleep(0.01)
    shown.on_progress(training, {"batch": batch, "samples": 100 * batch, "loss": 0.25, "accuracy": 0.875})
print("printed by the program")
shown.on_note(training, "a [bold] line")
shown.on_fit_end(training)
"""


def test_a_terminal_gets_one_bar() -> None:
    """Standard error is a terminal, standard output a pipe."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "110"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            part = b""
        if not part:
            break
        shown += part
    os.close(ours)
    printed, _ = process.communicate()
    assert process.returncode == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    for words in ("epoch 3/10", "2000/2000", "samples/s  train_loss 0.2500  train_acc 0.8750", "a [bold] line"):
        assert words in text
    assert printed == "printed by the program\n"
    assert shown.endswith(b"\x1b[?25h\r\x1b[1A\x1b[2K"), "the cursor is shown again, and the bar is gone"


def test_a_job_without_a_whole_epoch_has_no_seconds() -> None:
    row = {"epoch": 2, "seconds": 1.5, "whole": False, "val_acc": 0.8671}
    assert str(Result(rows=[row], devices=["cpu"])) == "val_acc 0.867 on [cpu]"
    regression = {"val_acc": None, "val_loss": 0.1234, "seconds": 0.42}
    assert str(Result(rows=[regression], devices=["cpu"])) == "val_loss 0.123, 0.42 sec/epoch on [cpu]"
    assert str(Result(rows=[{**row, "whole": True}], devices=["cpu"])) == "val_acc 0.867, 1.50 sec/epoch on [cpu]"
    assert str(Result(devices=["cpu", "cpu"])) == "trained on [cpu, cpu]"


def test_an_epochs_line_has_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctest.testmod(display).failed == 0
    row = {"epoch": 1, "train_loss": 0.5, "train_acc": 0.75, "val_loss": 0.4, "val_acc": 0.8, "seconds": 1.5}
    shown, training = started(2)
    shown.on_epoch_end(training, {**row, "val_f1": 0.7, "val_matrix": [[1, 2], [3, 4]]})
    shown.on_epoch_end(training, {**row, "epoch": 2, "train_acc": None, "val_acc": None})
    shown.on_fit_end(training)
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1: train_loss 0.500, train_acc 0.750, val_loss 0.400, val_acc 0.800, val_f1 0.700, seconds 1.500",
        "epoch 2: train_loss 0.500, val_loss 0.400, seconds 1.500",
    ]


@pytest.mark.pictures
def test_a_run_draws_itself(tmp_path: Path) -> None:
    """At the end, and now and then before; whatever goes wrong is a note."""
    pytest.importorskip("matplotlib")
    training, picture = Training(2, tmp_path), Picture("Net")
    training.rows, training.result = [{"epoch": 1, "train_loss": 1.0}], Result(devices=["cpu"])
    picture.on_fit_start(training)
    picture.on_fit_end(training)
    assert not list(tmp_path.iterdir()), "nothing was trained"
    training.rows.append({"epoch": 2, "train_loss": 0.5})
    picture.on_epoch_end(training, training.rows[-1])
    assert not list(tmp_path.iterdir()), "not so soon"
    picture.on_fit_end(training)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    training.run = tmp_path / "curves.png"
    picture.on_fit_end(training)
    assert training.result.notes[0].startswith("no picture: ")
