"""``manyhands lab`` as people type it: the list, one real run with its report in a browser, and every refusal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import title_after

from manyhands.cli import lab, main
from manyhands.lab.experiment import NAMES, Experiment, load
from manyhands.lab.finding import Finding, Plot, Sweep, Times, Trial
from manyhands.lab.report import SCHEMA, Output, Report, Result
from manyhands.schedule.pictures.timeline import Span


def command(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "manyhands", "lab", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab"]) == 0
    out = capsys.readouterr().out
    for name in NAMES:
        assert f"{name} " in out
        assert load(name).question in out
        assert load(name).exercise in out


def _refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["lab", "run", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line


def test_bad_input_is_one_line_before_anything_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean how-linear?" in _refusal(capsys, "how-liner")
    assert "there are cpu-or-gpu, " in _refusal(capsys, "xyz")
    assert "there is no folder" in _refusal(capsys, "how-linear", "--html", str(tmp_path / "none" / "r.html"))
    assert "it is a folder" in _refusal(capsys, "how-linear", "--json", str(tmp_path))
    (tmp_path / "file").write_text("")
    assert "cannot be made" in _refusal(capsys, "how-linear", "--out", str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("all-busy", "manyhands lab run all-busy"),
        ("all_busy", "manyhands lab run all-busy"),
        ("all", "manyhands lab run all"),
        ("list", "manyhands lab"),
        ("rum", "run"),
    ],
)
def test_who_leaves_out_run_is_shown_the_command(capsys: pytest.CaptureFixture[str], word: str, meant: str) -> None:
    with pytest.raises(SystemExit):
        main(["lab", word])
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "no permission" in _refusal(capsys, "how-linear", "--html", str(tmp_path / "r.html"))


def test_a_framework_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mxnet", None)
    line = _refusal(capsys, "all", "--framework", "mxnet", "--out", str(tmp_path))
    assert "pip install 'manyhands[mxnet]'" in line


def test_a_run_keeps_raw_trials_with_where_they_come_from(tmp_path: Path) -> None:
    child = command("run", "how-linear", "--quick", "--framework", "torch", "--out", str(tmp_path))
    out, err = child.communicate(timeout=500)
    assert child.returncode == 0, err
    assert "Are two devices twice as fast as one?" in out
    assert f"written: {tmp_path / 'report.html'}" in out
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["schema"] == SCHEMA
    assert data["host"]["usable_cores"] >= 1
    assert data["frameworks"][0]["version"]
    (result,) = data["results"]
    if result["status"] == "not measured":
        assert "not measured: the machine is busy: " in out
        assert result["finding"] is None
        return
    assert result["status"] == "done"
    assert {trial["name"] for trial in result["trials"]} >= {"one after the other", "at once"}
    assert all(trial["seconds"] > 0 for trial in result["trials"])
    if result["virtual"]:
        assert "virtual" in result["finding"]["conclusion"]
    svg = tmp_path / "plots" / "how-linear-torch-2.svg"
    assert "when each works" in svg.read_text()
    assert svg.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A report with every kind of plot."""
    times = Times({"plain": [2.0, 2.2, 2.1], "fast": [1.0, 1.1, 1.0]})
    spans = [Span("mm", "lane 1", 0.0, 1.0), Span("copy", "lane 2", 0.5, 2.0)]
    drawing = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="90"><rect width="90" height="90"/></svg>'
    plots = [times.bars("Bars", {"the least": 0.9}), Sweep({8: times, 64: times}).lines("By size", "rows")]
    plots += [Plot("timeline", "When", spans=spans), Plot("drawing", "The graph", drawing=drawing)]
    finding = Finding("Yes.", [times.table(to="plain")], plots, ["A note."])
    result = Result("how-linear", "?", "GPUs.", "torch", "done", 1.0, finding, [Trial("fast", {}, 1.0)])
    frameworks = [{"framework": "torch", "version": "2", "devices": []}]
    report = Report(True, {"name": "a processor", "cores": 2, "usable_cores": 2}, frameworks, [result])
    output = Output(folder=tmp_path)
    output.check()
    output.write(report)
    return tmp_path


def test_every_field_of_the_json_is_documented(folder: Path) -> None:
    documented = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()

    def names(value: object) -> set[str]:
        if isinstance(value, dict):
            inside = [names(part) for key, part in value.items() if key not in ("settings", "devices", "bounds")]
            return {*value}.union(*inside)
        return set().union(*(names(part) for part in value)) if isinstance(value, list) else set()

    fields = names(json.loads((folder / "report.json").read_text()))
    assert fields >= {"trials", "spans", "series", "exercise"}
    assert {name for name in fields if f"`{name}`" not in documented} == set()


@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_every_plot_without_an_error(folder: Path, width: int) -> None:
    script = (
        "document.title = [document.documentElement.scrollWidth <= innerWidth, document.images.length,"
        "[...document.images].every(plot => plot.complete && plot.naturalWidth > 50)].join(' ')"
    )
    assert title_after(folder / "report.html", script, width=width) == ("true 4 true", "")


def test_a_console_error_would_be_seen(folder: Path) -> None:
    assert "boom" in title_after(folder / "report.html", "throw new Error('boom')")[1]


def test_a_failed_experiment_does_not_stop_the_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An experiment that is in no list dies in its own process."""
    broken = [Experiment(name, f"{name}?", "")(lambda bench: Finding("")) for name in ("first", "second")]
    page = tmp_path / "report.html"
    jobs = [("torch", one) for one in broken]
    report = Report(True, {}, [{"framework": "torch", "version": "", "devices": []}])
    assert lab._run_all(jobs, report, Output(html=page)) == 1
    assert capsys.readouterr().out.count("failed: its process ended with status 1") == 2
    assert "there is no experiment &#x27;second&#x27;" in page.read_text()


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path) -> None:
    """Interrupted in the second experiment: the first is in the report whole."""
    page = tmp_path / "report.json"
    child = command("run", "cpu-or-gpu", "eight-operations", "--quick", "--framework", "torch", "--json", str(page))
    deadline = time.monotonic() + 300
    while not page.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=100)
    assert child.returncode == 130
    assert "the report has the finished experiments" in err
    first, second = json.loads(page.read_text())["results"]
    assert (first["status"], second["status"]) in (("done", "interrupted"), ("not measured", "interrupted"))
