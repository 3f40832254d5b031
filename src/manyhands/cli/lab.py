"""``manyhands lab``: the textbook's experiments on this machine, as tables, plots and one report."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape

from manyhands import __version__, machine
from manyhands.cli import flags, probe
from manyhands.cli.flags import File, Reads
from manyhands.device import FRAMEWORKS
from manyhands.errors import BadSettings, FrameworkMissing
from manyhands.files import check_writable
from manyhands.lab import experiment as experiments
from manyhands.lab import process
from manyhands.lab.experiment import Experiment
from manyhands.lab.report import ExperimentResult, LabReport, page, text
from manyhands.placement import moves

_INTERRUPTED = 130


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Without arguments, lists the experiments. docs/lab.md explains the reports."
    parser.set_defaults(run_command=lambda _: _list())
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", help="default: list the experiments")
    flags.add_command(actions.add_parser("run", help="run experiments and write a report"), run)


def _list() -> int:
    width = max(map(len, experiments.NAMES))
    for name in experiments.NAMES:
        listed = experiments.load(name)
        print(f"{name:{width}}  {listed.question}\n{'':{width}}  {listed.exercise}")
    print("\nmanyhands lab run NAME... (or all) runs them; --quick takes small sizes")
    return 0


def run(
    names: Annotated[list[str], Reads(nargs="+", metavar="NAME")],
    *,
    framework: Annotated[list[str], Reads(action="append", choices=FRAMEWORKS)] | None = None,
    quick: bool = False,
    html: File = Path("lab-report.html"),
    json: File | None = None,
) -> int:
    """Runs experiments on this machine's devices.

    Virtual devices stand in where there are too few, and are marked. Exit code: 0; 1 if an experiment failed; 130 after
    Ctrl-C, which keeps finished experiments.

    Args:
        names: Names of experiments, or all.
        framework: Repeat for several. Default: the first that is installed.
        quick: Small sizes, few rounds. Default: no.
        html: The report, one HTML page. Default: lab-report.html.
        json: Write the raw trials. Default: no file.
    """
    everything = experiments.NAMES if "all" in names else ()
    wanted = dict.fromkeys(name for name in (*everything, *names) if name != "all")
    chosen = [experiments.load(name) for name in wanted]
    frameworks = list(dict.fromkeys(framework or probe.installed_frameworks()[:1]))
    if not frameworks:
        raise FrameworkMissing("no framework is installed: pip install 'manyhands[torch]'")
    for name in frameworks:
        moves.require(name)
    jobs = [(name, experiment) for name in frameworks for experiment in chosen if name in experiment.frameworks]
    if not jobs:
        raise BadSettings(f"none of these experiments is for {', '.join(frameworks)}")
    for path in filter(None, (html, json)):
        check_writable(path, BadSettings)
    with Console(stderr=True, quiet=not sys.stderr.isatty()).status("asking the frameworks for their devices"):
        replies = list(map(probe.ask, frameworks))
    for reply in replies:
        if "error" in reply:
            raise FrameworkMissing(f"{reply['framework']} does not start here: {reply['error']}")
    report = LabReport(quick, asdict(machine.host()), replies, manyhands=__version__)
    return run_all(jobs, report, html, json)


def run_all(jobs: list[tuple[str, Experiment]], report: LabReport, html: Path, json: Path | None) -> int:
    """Run the experiments; the report is written after each."""
    gpus = {reply["framework"]: sum(row["kind"] == "gpu" for row in reply["devices"]) for reply in report.frameworks}
    with Console(stderr=True, quiet=not sys.stderr.isatty()).status("") as status:  # a notebook keeps every redraw
        for number, (framework, experiment) in enumerate(jobs, start=1):
            head = f"{number}/{len(jobs)} {experiment.name} ({framework})"
            status.update(head)

            def say(line: str, head: str = head) -> None:
                status.update(f"{head}: {escape(line)}")

            try:
                result = process.run(experiment, framework, quick=report.quick, gpus=gpus[framework], say=say)
            except KeyboardInterrupt:
                why = "stopped by Ctrl-C before it was finished"
                result = ExperimentResult.of(experiment, framework, "interrupted", why=why)
            report = report.with_result(result)
            print(text(result), flush=True)
            html.write_text(page(report), encoding="utf-8")
            if json is not None:
                json.write_text(report.as_json(), encoding="utf-8")
            if result.status == "interrupted":
                break
    for path in filter(None, (html, json)):
        print(f"written: {path}")
    if result.status == "interrupted":
        print("manyhands lab: interrupted; the report has the finished experiments", file=sys.stderr)
        return _INTERRUPTED
    return int(any(result.status == "failed" for result in report.results))
