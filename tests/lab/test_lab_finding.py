"""What the lab makes of figures: comparisons, marks, files. No framework."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from manyhands import machine
from manyhands.lab import process
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import NAMES, Experiment, load
from manyhands.lab.finding import Answer, Comparison, Plot, Series, Sweep, Times
from manyhands.lab.report import ExperimentResult, LabReport, mark_virtual, page, svg, text
from manyhands.schedule.timeline import Span

PAGE = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()
HOST = {"name": "a processor", "cores": 2, "usable_cores": 2}
TIMES = Times({"plain": [2.0, 2.2, 2.1], "fast": [1.0, 1.1, 1.0]})


class Module:
    """Counts how often the devices are waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_a_comparison_is_clear_only_if_every_round_agrees() -> None:
    gain = TIMES.compare("fast", to="plain")
    assert gain.faster
    assert str(gain) == "is 2.10 times as fast"
    assert str(Comparison(0.5, 0.4, 0.6)) == "takes 2.00 times as long"
    assert str(Comparison(1.3, 0.9, 1.5)) == "is 0.90 to 1.50 times as fast, round by round"


def test_methods_are_timed_in_turns_and_each_round_begins_with_another() -> None:
    module = Module()
    bench = Bench(module, "torch", quick=True)
    times = bench.trials({"a": lambda: None, "b": lambda: None}, {"size": 3}, rounds=3)
    assert [len(spent) for spent in times.values()] == [3, 3]
    assert "".join(trial.name for trial in bench.recorded) == "abbaab"
    assert all(trial.settings == {"size": 3} for trial in bench.recorded)
    assert module.waits == 20  # before and after: warm-up and calibration of each, three rounds of each


def test_virtual_devices_are_marked_in_table_plot_and_conclusion() -> None:
    finding = Answer("Yes.", [TIMES.table(to="plain", title="T")], [TIMES.bars("P")])
    assert mark_virtual(finding, [], "torch") is finding
    shown = mark_virtual(finding, ["virtual:0", "virtual:1"], "torch")
    assert all("virtual" in text for text in (shown.conclusion, shown.tables[0].title, shown.plots[0].title))


PLOTS = [
    TIMES.bars("Bars & <b>", {"least": 0.9}),
    Plot("line", "L", [Series("a", [1, 10, 100], [1.0, 2.0, 4.0])], x_label="x"),
    Plot("line", "one point", [Series("a", [1], [0.5])]),
    Plot("timeline", "T", spans=[Span("_to_copy", "a", 0.0, 1.0), Span("copy", "b", 0.5, 2.0)]),
    Plot("drawing", "D", drawing='<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'),
]


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.kind)
def test_a_plot_is_whole_svg_that_follows_the_reader(plot: Plot) -> None:
    import xml.etree.ElementTree as xml

    text = svg(plot)
    drawn = xml.fromstring(text)
    assert drawn.tag.endswith("svg")
    if plot.kind != "drawing":
        assert drawn.attrib["aria-label"] == plot.title
        assert "currentColor" in text
        assert "prefers-color-scheme: dark" in text
        assert svg(plot) == text


def test_a_sweep_says_where_a_method_is_faster() -> None:
    slow, even = Times({"plain": [1.0] * 3, "fast": [2.0] * 3}), Times({"plain": [1.0] * 3, "fast": [1.0] * 3})
    sweep = Sweep({64: slow, 128: even, 256: TIMES})
    assert sweep.in_words("fast", "plain") == (
        "fast: faster than plain at 256 (up to 2.10 times); slower than plain at 64 (up to 2.00 times)."
    )
    assert Sweep({128: even}).in_words("fast", "plain") == "fast: no clear difference from plain."
    assert [row[-1] for row in sweep.table("size", "T", gain="fast", to="plain").rows] == ["0.50", "1.00", "2.10"]


def _unlike(*ratios: float) -> Experiment:
    """An experiment that measures these gains on two devices, one in each run."""
    gains = iter(ratios)
    return _that(lambda bench: Answer(str(Times({"a": [1.0], "b": [next(gains)]}).compare("a", to="b", most=2))))


@pytest.mark.parametrize(
    ("gains", "status", "said"),
    [
        ((1.9,), "done", "is 1.90 times as fast"),
        ((77.54, 1.9), "done", "is 1.90 times as fast"),
        ((77.54, 2.02), "not measured", "the machine is busy: a was 2.02 times as fast as b"),
        ((2.004,), "done", "is 2.00 times as fast"),
    ],
)
def test_what_cannot_be_true_is_measured_again_and_then_refused(
    gains: tuple[float, ...], status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "check_load", lambda: None)
    result = process.perform(_unlike(*gains), Bench(Module(), "torch", quick=True))
    assert result.status == status
    assert said in (result.finding.conclusion if result.finding else result.why)


def test_a_loaded_machine_is_measured_again_and_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter((5.0, 80.0, 5.0, 5.0))
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: next(seen, 80.0))
    assert process.perform(_unlike(1.5, 1.5), Bench(Module(), "torch", quick=True)).status == "done"
    assert next(seen, None) is None
    result = process.perform(_unlike(1.5), Bench(Module(), "torch", quick=True))
    assert (result.status, result.finding) == ("not measured", None)
    assert result.why.startswith("the machine is busy: other programs use 80% of the CPU, and 30% is the most")
    assert "not measured: the machine is busy" in text(result)
    assert "not measured: the machine is busy" in page(LabReport(True, HOST, [], [result]))


def test_json_has_null_for_what_is_no_number() -> None:
    plot = Plot("line", "L", [Series("a", [1, 2], [math.nan, 1.0])])
    result = ExperimentResult("how-linear", "?", "", "torch", "done", math.inf, Answer("Yes.", [], [plot]))
    (data,) = json.loads(LabReport(True, HOST, [], [result]).as_json(), parse_constant=pytest.fail)["results"]
    assert data["seconds"] is None
    assert data["finding"]["plots"][0]["series"][0]["y"] == [None, 1.0]


def _that(function: Any) -> Experiment:
    return Experiment("probe", "?", "")(function)


def test_an_error_in_an_experiment_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "check_load", lambda: None)

    def fails(bench: Bench) -> Answer:
        raise ZeroDivisionError("by hand")

    result = process.perform(_that(fails), Bench(Module(), "torch", quick=True))
    assert result.status == "failed"
    assert "ZeroDivisionError: by hand (test_lab_finding.py:" in result.why


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_is_called_as_it_is_listed(name: str) -> None:
    loaded = load(name)
    assert loaded.name == name
    assert loaded.question.endswith("?")
    assert f"| `{name}` |" in PAGE, "docs/lab.md has a row for it"
    assert loaded.exercise.split(":")[0] in ("GPUs", "Automatic parallelism") or "several GPUs" in loaded.exercise
