"""``manyhands lab``: the textbook's experiments on this machine, as tables, plots and one report."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.cli import flags
from manyhands.device import FRAMEWORKS
from manyhands.errors import BadSettings, FrameworkMissing, ManyhandsError

if TYPE_CHECKING:
    from rich.status import Status

    from manyhands.lab.experiment import Experiment
    from manyhands.lab.report import Output, Report

_FOLDER = Path("lab-report")
_BAD_INPUT, _FAILED, _INTERRUPTED = 2, 1, 130


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Without arguments, lists the experiments. docs/lab.md explains the reports."
    assert isinstance(parser, flags.Parser)
    parser.likely = _likely
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", help="default: list the experiments")
    running = actions.add_parser(
        "run",
        help="run experiments and write a report",
        description="Runs experiments on this machine's devices. Virtual devices stand in where there are too few, "
        "and are marked. Exit code: 0; 1 if an experiment failed; 2 for bad input; 130 after Ctrl-C, which keeps "
        "finished experiments.",
    )
    option = running.add_argument
    option("names", nargs="+", metavar="NAME", help="names of experiments, or all")
    option(
        "--framework",
        action="append",
        choices=FRAMEWORKS,
        help="repeat for several; default: the first that is installed",
    )
    option("--quick", action="store_true", help="small sizes, few rounds; default: no")
    option("--html", **flags.FILE, help="write the report as one HTML page; default: see --out")
    option("--json", **flags.FILE, help="write the raw trials; default: see --out")
    option(
        "--out",
        type=Path,
        metavar="DIR",
        help="write report.html, report.json and every plot (SVG, PNG) there; default: lab-report, unless --html or "
        "--json says where",
    )


def _likely(word: str) -> str | None:
    """The command that was probably meant if ``run`` is missing."""
    from manyhands.lab import experiment as experiments

    if word == "list":
        return "manyhands lab"
    near = word if word == "all" else experiments.nearest(word)
    return None if near is None else f"manyhands lab run {near}"


def _list() -> int:
    from manyhands.lab import experiment as experiments

    width = max(map(len, experiments.NAMES))
    for name in experiments.NAMES:
        listed = experiments.load(name)
        print(f"{name:{width}}  {listed.question}\n{'':{width}}  {listed.exercise}")
    print("\nmanyhands lab run NAME... (or all) runs them; --quick takes small sizes")
    return 0


def run(options: argparse.Namespace) -> int:
    return _list() if options.action is None else _run(options)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from manyhands.lab.report import Output

    written = options.html or options.json or options.out
    output = Output(options.html, options.json, options.out if written else _FOLDER)
    try:  # refuse bad options before anything runs
        chosen = _chosen(options.names)
        frameworks = _frameworks(options.framework)
        jobs = [(name, experiment) for name in frameworks for experiment in chosen if name in experiment.frameworks]
        if not jobs:
            raise BadSettings(f"none of these experiments is for {', '.join(frameworks)}")
        output.check()
        with Console(stderr=True).status("asking the frameworks for their devices"):
            report = _begin(frameworks, options.quick)
    except ManyhandsError as error:
        print(f"manyhands lab: {error}", file=sys.stderr)
        return _BAD_INPUT
    return _run_all(jobs, report, output)


def _chosen(names: list[str]) -> list[Experiment]:
    from manyhands.lab import experiment as experiments

    everything = experiments.NAMES if "all" in names else ()
    wanted = dict.fromkeys(name for name in (*everything, *names) if name != "all")
    return [experiments.load(name) for name in wanted]


def _frameworks(wanted: list[str] | None) -> list[str]:
    from manyhands.cli import probe
    from manyhands.placement import moves

    if wanted is None:
        installed = probe.installed()
        if not installed:
            raise FrameworkMissing("no framework is installed: pip install 'manyhands[torch]'")
        return installed[:1]
    for name in wanted:
        moves.require(name)
    return list(dict.fromkeys(wanted))


def _run_all(jobs: list[tuple[str, Experiment]], report: Report, output: Output) -> int:
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        try:
            for number, (framework, experiment) in enumerate(jobs):
                head = f"{number + 1}/{len(jobs)} {experiment.name} ({framework})"
                status.update(head)
                say = functools.partial(_say, status, head)
                report = _run_one(report, experiment, framework, say)
                print(_shown(report), flush=True)  # before the files: drawing takes a while, and the disk may be full
                output.write(report)
        except KeyboardInterrupt:
            if len(report.results) < len(jobs):
                report = _interrupted(report, *jobs[len(report.results)])
            output.write(report)
            print("manyhands lab: interrupted; the report has the finished experiments", file=sys.stderr)
            code = _INTERRUPTED
        else:
            code = _FAILED if any(result.status == "failed" for result in report.results) else 0
    for path in output.pages():
        print(f"written: {path}")
    return code


def _begin(frameworks: list[str], quick: bool) -> Report:
    from dataclasses import asdict

    from manyhands import __version__, machine
    from manyhands.cli import probe
    from manyhands.lab.report import Report

    replies = [
        probe.ask(name, measured=False, expect=lambda n: None, progress=lambda text: None) for name in frameworks
    ]
    for reply in replies:
        if "error" in reply:
            raise FrameworkMissing(f"{reply['framework']} does not start here: {reply['error']}")
    return Report(quick, asdict(machine.host()), replies, manyhands=__version__)


def _say(status: Status, head: str, text: str) -> None:
    from rich.markup import escape

    status.update(f"{head}: {escape(text)}")


def _run_one(report: Report, experiment: Experiment, framework: str, say: Callable[[str], None]) -> Report:
    from manyhands.lab import process

    (reply,) = (reply for reply in report.frameworks if reply["framework"] == framework)
    gpus = sum(row["kind"] == "gpu" for row in reply["devices"])
    return report.with_result(process.run(experiment, framework, quick=report.quick, gpus=gpus, say=say))


def _shown(report: Report) -> str:
    from manyhands.lab.report import text

    return text(report.results[-1])


def _interrupted(report: Report, framework: str, experiment: Experiment) -> Report:
    from manyhands.lab.report import Result

    why = "stopped by Ctrl-C before it was finished"
    return report.with_result(
        Result(experiment.name, experiment.question, experiment.exercise, framework, "interrupted", why=why)
    )
