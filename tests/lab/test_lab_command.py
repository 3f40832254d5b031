"""``manyhands lab`` as people type it: the list, one real run with its report in a browser, and every refusal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import title_after

from manyhands.cli import lab, main
from manyhands.lab.experiment import NAMES, Experiment, load
from manyhands.lab.finding import Answer, Plot, Sweep, Times, Trial
from manyhands.lab.report import SCHEMA, ExperimentResult, LabReport, page
from manyhands.schedule.timeline import Span


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab"]) == 0
    out = capsys.readouterr().out
    for name in NAMES:
        assert f"{name} " in out
        assert load(name).question in out
        assert load(name).exercise in out


def test_bad_input_is_one_line_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mxnet", None)
    wrong = [
        (["how-liner"], "did you mean how-linear?"),
        (["xyz"], "there are cpu-or-gpu, "),
        (["how-linear", "--html", str(tmp_path / "none" / "r.html")], "there is no folder"),
        (["how-linear", "--json", str(tmp_path)], "it is a folder"),
        (["all", "--framework", "mxnet"], "pip install 'manyhands[mxnet]'"),
    ]
    for arguments, said in wrong:
        assert main(["lab", "run", *arguments]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert said in shown.err
        assert len(shown.err.splitlines()) == 1


def test_a_run_keeps_raw_trials_of_what_is_finished(tmp_path: Path) -> None:
    """Interrupted in the second experiment: the first is in the report whole, with where its trials come from."""
    page, data_file = tmp_path / "r.html", tmp_path / "r.json"
    command = [sys.executable, "-m", "manyhands", "lab", "run", "how-linear", "eight-operations", "--quick"]
    command += ["--framework", "torch", "--html", str(page), "--json", str(data_file)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not data_file.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=100)
    assert child.returncode == 130, err
    assert "the report has the finished experiments" in err
    assert "Are two devices twice as fast as one?" in out
    assert f"written: {page}" in out
    data = json.loads(data_file.read_text())
    assert data["schema"] == SCHEMA
    assert data["host"]["usable_cores"] >= 1
    assert data["frameworks"][0]["version"]
    result, second = data["results"]
    assert second["status"] == "interrupted"
    if result["status"] == "not measured":
        assert "not measured: the machine is busy: " in out
        assert result["finding"] is None
        return
    assert result["status"] == "done"
    assert {trial["name"] for trial in result["trials"]} >= {"one after the other", "at once"}
    assert all(trial["seconds"] > 0 for trial in result["trials"])
    if result["virtual"]:
        assert "virtual" in result["finding"]["conclusion"]


def report_of(*results: ExperimentResult) -> LabReport:
    frameworks = [{"framework": "torch", "version": "2", "devices": []}]
    return LabReport(True, {"name": "a processor", "cores": 2, "usable_cores": 2}, frameworks, results)


@pytest.fixture
def report() -> LabReport:
    """A report with every kind of plot."""
    times = Times({"plain": [2.0, 2.2, 2.1], "fast": [1.0, 1.1, 1.0]})
    spans = [Span("mm", "lane 1", 0.0, 1.0), Span("copy", "lane 2", 0.5, 2.0)]
    drawing = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="90"><rect width="90" height="90"/></svg>'
    plots = [times.bars("Bars", {"the least": 0.9}), Sweep({8: times, 64: times}).lines("By size", "rows")]
    plots += [Plot("timeline", "When", spans=spans), Plot("drawing", "The graph", drawing=drawing)]
    finding = Answer("Yes.", [times.table(to="plain")], plots, ["A note."])
    return report_of(
        ExperimentResult("how-linear", "?", "GPUs.", "torch", "done", 1.0, finding, [Trial("fast", {}, 1.0)])
    )


def test_every_field_of_the_json_is_documented(report: LabReport) -> None:
    documented = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()

    def names(value: object) -> set[str]:
        if isinstance(value, dict):
            inside = [names(part) for key, part in value.items() if key not in ("settings", "devices", "bounds")]
            return {*value}.union(*inside)
        return set().union(*(names(part) for part in value)) if isinstance(value, list) else set()

    fields = names(json.loads(report.as_json()))
    assert fields >= {"trials", "spans", "series", "exercise"}
    assert {name for name in fields if f"`{name}`" not in documented} == set()


@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_every_plot_without_an_error(report: LabReport, width: int, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(report))
    script = (
        "document.title = [document.documentElement.scrollWidth <= innerWidth, document.images.length,"
        "[...document.images].every(plot => plot.complete && plot.naturalWidth > 50)].join(' ')"
    )
    assert title_after(file, script, width=width) == ("true 4 true", "")
    assert "boom" in title_after(file, "throw new Error('boom')")[1], "a console error would be seen"


def test_a_failed_experiment_does_not_stop_the_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An experiment that is in no list dies in its own process."""
    broken = [Experiment(name, f"{name}?", "")(lambda bench: Answer("")) for name in ("first", "second")]
    file = tmp_path / "report.html"
    assert lab.run_all([("torch", one) for one in broken], report_of(), file, None) == 1
    assert capsys.readouterr().out.count("failed: its process ended with status 1") == 2
    assert "there is no experiment &#x27;second&#x27;" in file.read_text()
