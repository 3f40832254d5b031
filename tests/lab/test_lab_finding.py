"""What the lab makes of figures: comparisons, marks, files. No framework."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import BadSettings, NotHere
from manyhands.lab import experiments, html, plots, png, process
from manyhands.lab.bench import Bench
from manyhands.lab.experiment import Experiment, experiment
from manyhands.lab.finding import Bound, Comparison, Finding, Plot, Series, Times
from manyhands.lab.output import Output
from manyhands.lab.result import Report, Result, marked
from manyhands.schedule import timing
from manyhands.schedule.pictures.timeline import Span

TIMES = Times({"plain": [2.0, 2.2, 2.1], "fast": [1.0, 1.1, 1.0]})


class Door:
    """Counts how often the devices are waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_ways_run_in_turns_and_each_round_begins_with_another() -> None:
    order: list[str] = []

    def seconds_of(way: str) -> float:
        order.append(way)
        return len(order)

    turns = list(itertools.islice(timing.rounds("ab", seconds_of), 3))
    assert "".join(order) == "abbaab"
    assert turns == [[1, 2], [4, 3], [5, 6]]


def test_a_comparison_is_clear_only_if_every_round_agrees() -> None:
    gain = TIMES.compare("fast", to="plain")
    assert gain.faster
    assert str(gain) == "is 2 times as fast"
    assert str(Comparison(0.5, 0.4, 0.6)) == "takes 2 times as long"
    assert str(Comparison(1.3, 0.9, 1.5)) == "is 0.9 to 1.5 times as fast, round by round"


def test_trials_are_kept_and_end_with_a_wait() -> None:
    door = Door()
    bench = Bench(door, "torch", quick=True)
    times = bench.trials({"a": lambda: None, "b": lambda: None}, {"size": 3}, rounds=2)
    assert [len(spent) for spent in times.values()] == [2, 2]
    assert [(trial.name, trial.settings) for trial in bench.recorded] == [("a", {"size": 3}), ("b", {"size": 3})] * 2
    assert door.waits == 16  # before and after: warm-up and calibration of each, two rounds of each


def test_virtual_devices_are_marked_in_table_plot_and_conclusion() -> None:
    finding = Finding("Yes.", [TIMES.table(to="plain", title="T")], [TIMES.bars("P")])
    assert marked(finding, [], "torch") is finding
    shown = marked(finding, ["virtual:0", "virtual:1"], "torch")
    assert all("virtual" in text for text in (shown.conclusion, shown.tables[0].title, shown.plots[0].title))


def test_a_report_is_the_same_after_json() -> None:
    timeline = Plot("timeline", "L", spans=[Span("mm", "lane 1", 0.0, 1.0)])
    finding = Finding("Yes.", [TIMES.table(to="plain")], [TIMES.bars("P", [Bound("b", 1.0)]), timeline], ["a note"])
    result = Result("two-devices", "?", "torch", "done", 1.0, finding)
    data = Report(True, {}, [], [result]).as_data()
    again = Report.from_data(json.loads(json.dumps(data)))
    assert again.as_data() == json.loads(json.dumps(data))


PLOTS = [
    TIMES.bars("Bars", [Bound("least", 0.9)]),
    Plot("line", "L & <M>", [Series("a", [1, 10, 100], [1.0, 2.0, 4.0])], log_x=True, log_y=True, x_label="x"),
    Plot("line", "one point", [Series("a", [1], [0.0])]),
    Plot("timeline", "T", spans=[Span("mm", "a", 0.0, 1.0), Span("copy", "b", 0.5, 2.0)]),
]


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.title)
def test_a_plot_is_whole_svg(plot: Plot) -> None:
    import xml.etree.ElementTree as xml

    drawn = xml.fromstring(plots.svg(plot, alone=True))
    width, height = map(float, drawn.attrib["viewBox"].split()[2:])
    for box in drawn.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(box.attrib["x"]) <= float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_json_has_null_for_what_is_no_number(tmp_path: Path) -> None:
    plot = Plot("line", "L", [Series("a", [1, 2], [math.nan, 1.0])])
    report = Report(True, {}, [], [Result("two-devices", "?", "torch", "done", math.inf, Finding("Yes.", [], [plot]))])
    Output(json=tmp_path / "r.json", html=tmp_path / "r.html").write(report)
    (result,) = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)["results"]
    assert result["seconds"] is None
    assert result["finding"]["plots"][0]["series"][0]["y"] == [None, 1.0]
    assert "nan" not in (tmp_path / "r.html").read_text()


def _that(function: Any) -> Experiment:
    return experiment("probe", question="?")(function)


def test_how_an_experiment_ends_is_in_its_result() -> None:
    def fails(bench: Bench) -> Finding:
        raise ZeroDivisionError("by hand")

    def has_nothing(bench: Bench) -> Finding:
        bench.not_here("no GPU")

    ends = [process.perform(_that(run), Bench(Door(), "torch")) for run in (fails, has_nothing)]
    assert [end.status for end in ends] == ["failed", "not here"]
    assert "ZeroDivisionError: by hand (test_lab_finding.py:" in ends[0].why
    with pytest.raises(NotHere):
        Bench(Door(), "torch").not_here("x")


@pytest.mark.parametrize("name", experiments.NAMES)
def test_every_experiment_is_called_as_it_is_listed(name: str) -> None:
    loaded = experiments.load(name)
    assert loaded.name == name
    assert loaded.question.endswith("?")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_named() -> None:
    with pytest.raises(BadSettings, match="'/dev/full' cannot be written: No space left on device"):
        Output(json=Path("/dev/full")).write(Report(True, {}, []))


def test_a_busy_machine_is_told() -> None:
    assert Report(True, {"load_percent": 5.0}, []).warning is None
    busy = Report(True, {"load_percent": 80.0}, [])
    assert busy.warning is not None
    assert busy.warning.startswith("Other programs kept 80% of the CPU busy")
    assert busy.warning in html.facts(busy)


def test_a_png_names_every_colour_and_times_between_powers_of_ten(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    png._timeline(axes, Plot("timeline", "t", spans=[Span("_to_copy", "cpu", 0.0, 1.0), Span("mm", "cpu", 1.0, 2.0)]))
    assert axes.get_legend_handles_labels()[1] == ["to_copy", "mm"]
    axes = Figure().add_subplot()
    line = Plot("line", "t", [Series("a", [1.0, 2.0], [0.3, 2.1])], log_y=True, unit="s")
    png._lines(axes, line)
    assert axes.yaxis.get_minor_formatter()(0.5, 0) == "500 ms"
    assert axes.yaxis.get_minor_formatter()(0.4, 0) == ""
    assert png.draw(line, tmp_path / "a.png") == tmp_path / "a.png"


def test_ways_are_compared_with_one_thread_where_that_is_asked_for() -> None:
    norms, two, cpu = map(experiments.load, ("logging-norms", "two-devices", "cpu-or-gpu"))
    assert [norms.uses_one_core(gpus) for gpus in (0, 1)] == [True, False]
    assert [two.uses_one_core(gpus) for gpus in (0, 1, 2)] == [True, True, False]
    assert not cpu.uses_one_core(0)
    assert process.environment(one_core=True)["OMP_NUM_THREADS"] == "1"


def test_the_legend_of_a_timeline_covers_no_box() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    png._timeline(axes, Plot("timeline", "t", spans=[Span("mm", "cpu", 0.0, 1.0), Span("sub", "cpu", 1.0, 2.0)]))
    figure.draw_without_rendering()
    assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1
