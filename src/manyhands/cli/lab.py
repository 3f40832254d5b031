"""``manyhands lab``: the textbook's experiments on this machine, as tables, plots and one report."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from manyhands import __version__, machine
from manyhands.cli import flags, probe
from manyhands.device import FRAMEWORKS
from manyhands.errors import BadSettings, FrameworkMissing, ManyhandsError
from manyhands.lab import experiment as experiments
from manyhands.lab import process
from manyhands.lab.experiment import Experiment
from manyhands.lab.report import Output, Report, Result, text
from manyhands.placement import moves

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
    if word == "list":
        return "manyhands lab"
    near = word if word == "all" else experiments.nearest(word)
    return None if near is None else f"manyhands lab run {near}"


def _list() -> int:
    width = max(map(len, experiments.NAMES))
    for name in experiments.NAMES:
        listed = experiments.load(name)
        print(f"{name:{width}}  {listed.question}\n{'':{width}}  {listed.exercise}")
    print("\nmanyhands lab run NAME... (or all) runs them; --quick takes small sizes")
    return 0


def run(options: argparse.Namespace) -> int:
    return _list() if options.action is None else _run(options)


def _run(options: argparse.Namespace) -> int:
    written = options.html or options.json or options.out
    output = Output(options.html, options.json, options.out if written else _FOLDER)
    try:  # refuse bad options before anything runs
        everything = experiments.NAMES if "all" in options.names else ()
        wanted = dict.fromkeys(name for name in (*everything, *options.names) if name != "all")
        chosen = [experiments.load(name) for name in wanted]
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


def _frameworks(wanted: list[str] | None) -> list[str]:
    if wanted is None:
        installed = probe.installed()
        if not installed:
            raise FrameworkMissing("no framework is installed: pip install 'manyhands[torch]'")
        return installed[:1]
    for name in wanted:
        moves.require(name)
    return list(dict.fromkeys(wanted))


def _begin(frameworks: list[str], quick: bool) -> Report:
    replies = [
        probe.ask(name, measured=False, expect=lambda n: None, progress=lambda text: None) for name in frameworks
    ]
    for reply in replies:
        if "error" in reply:
            raise FrameworkMissing(f"{reply['framework']} does not start here: {reply['error']}")
    return Report(quick, asdict(machine.host()), replies, manyhands=__version__)


def _run_all(jobs: list[tuple[str, Experiment]], report: Report, output: Output) -> int:
    devices = {reply["framework"]: reply["devices"] for reply in report.frameworks}
    with Console(stderr=True).status("") as status:
        try:
            for number, (framework, experiment) in enumerate(jobs):
                head = f"{number + 1}/{len(jobs)} {experiment.name} ({framework})"
                status.update(head)
                gpus = sum(row["kind"] == "gpu" for row in devices[framework])

                def say(line: str, head: str = head) -> None:
                    status.update(f"{head}: {escape(line)}")

                result = process.run(experiment, framework, quick=report.quick, gpus=gpus, say=say)
                report = report.with_result(result)
                print(text(result), flush=True)  # before the files: drawing takes a while, and the disk may be full
                output.write(report)
        except KeyboardInterrupt:
            if len(report.results) < len(jobs):
                framework, cut = jobs[len(report.results)]
                why = "stopped by Ctrl-C before it was finished"
                result = Result(cut.name, cut.question, cut.exercise, framework, "interrupted", why=why)
                report = report.with_result(result)
            output.write(report)
            print("manyhands lab: interrupted; the report has the finished experiments", file=sys.stderr)
            code = _INTERRUPTED
        else:
            code = _FAILED if any(result.status == "failed" for result in report.results) else 0
    for path in output.pages():
        print(f"written: {path}")
    return code
