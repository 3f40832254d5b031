"""``manyhands audit``: every hidden wait and copy of a program, with its line, its cost, its gain and the cure."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manyhands.audit import speeds
from manyhands.audit.reports import html, sarif, table
from manyhands.audit.reports import report as reports
from manyhands.audit.reports.report import SCHEMA, Report
from manyhands.cli import flags
from manyhands.errors import BadSettings
from manyhands.files import check_writable

WAITS_TOO_LONG = 3


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "manyhands audit [options] (SCRIPT | -m MODULE) [arguments of the program]"
    parser.description = (
        "Runs a program unchanged and ends with a table on stderr, most expensive wait first. The exit "
        f"code is the program's; {WAITS_TOO_LONG} if the program succeeds and --fail-over is exceeded. A comment "
        "`# manyhands: wait-ok <reason>` on a line silences it. docs/audit.md lists what is detected."
    )
    option = parser.add_argument
    option(
        "--warmup", type=flags.whole_number(0), default=5, metavar="N", help="leave out the first N steps; default: 5"
    )
    option("--steps", **flags.COUNT, help="stop after N counted steps; default: run to the end")
    option(
        "--as-if-gpu",
        action="store_true",
        help="predict without a GPU: a virtual device stands in for one; default: audit the GPU",
    )
    option(
        "--speeds",
        **flags.FILE,
        help="output of `manyhands devices --measure --json` on the GPU that --as-if-gpu predicts; default: an H200's",
    )
    option("--json", **flags.FILE, help="write the report as JSON (docs/audit.md); default: no file")
    option("--sarif", **flags.FILE, help="write the findings as SARIF, for code scanning; default: no file")
    option("--html", **flags.FILE, help="write the report as one HTML page; default: no file")
    option(
        "--fail-over",
        type=_percent,
        metavar="P%",
        help=f"exit with {WAITS_TOO_LONG} if removing the findings gains more than P%% of a step; default: never",
    )
    option("--baseline", **flags.FILE, help="report only findings that this earlier --json report lacks; default: all")
    option(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        help="run a module as a program, with its arguments; default: a script",
    )
    option("program", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a script, with its arguments")


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a part of a step, as 5%")
    return value


def run(options: argparse.Namespace) -> int:
    program: list[str] = options.module or options.program
    if not program:
        raise BadSettings("audit needs a program: manyhands audit train.py, or manyhands audit -m package.train")
    if not options.module and not Path(program[0]).is_file():
        raise BadSettings(f"there is no file {program[0]!r} to audit")
    baseline = _baseline(options.baseline) if options.baseline is not None else None
    for path in (options.json, options.sarif, options.html):
        if path is not None:
            check_writable(path, BadSettings)
    with tempfile.TemporaryDirectory(prefix="manyhands-audit-") as folder:
        result = Path(folder) / "result.json"
        settings = _settings(options, program[0], result)
        code = _run_program(settings, program)
        report = Report.from_data(json.loads(result.read_text())) if result.is_file() else None
    if report is None:
        print(f"manyhands audit: {program[0]} {_how_it_ended(code)}: no report", file=sys.stderr)
        return _same_end(code)
    if baseline is not None:
        report = reports.new_since(report, baseline)
    _show(report, options)
    if code == 2 or "--as-if-gpu" in program:  # 2: as argparse ends
        flags.hint_misplaced("audit", program, options.parser)
    if code == 0 and options.fail_over is not None and (report.gain or 0.0) > options.fail_over:
        print(
            f"manyhands audit: removing the findings gains {report.gain:.1%}, more than the {options.fail_over:.1%} of "
            "--fail-over",
            file=sys.stderr,
        )
        return WAITS_TOO_LONG
    if options.fail_over is not None and report.gain is None and report.findings:
        print(
            "manyhands audit: --fail-over was not applied: the time of a step is unknown here, so there is nothing "
            "to compare with (docs/audit.md)",
            file=sys.stderr,
        )
    return _same_end(code)


def _baseline(path: Path) -> Report:
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError
        return Report.from_data(data)
    except OSError as error:
        raise BadSettings(f"--baseline {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BadSettings(f"--baseline {path} is not a report of `manyhands audit --json`") from None


def _settings(options: argparse.Namespace, name: str, result: Path) -> dict[str, Any]:
    if options.speeds is not None and not options.as_if_gpu:
        raise BadSettings("--speeds is for predictions: give --as-if-gpu, too")
    target = None
    if options.as_if_gpu:
        target = asdict(speeds.load(options.speeds) if options.speeds is not None else speeds.h200())
    return {
        "program": name,
        "module": bool(options.module),
        "warmup": options.warmup,
        "steps": options.steps,
        "speeds": target,
        "result": str(result),
    }


def _run_program(settings: dict[str, Any], program: Sequence[str]) -> int:
    """Run the program in a separate process, with our stdin, stdout and stderr; returns its exit status.

    Signals go on to the program, which they are meant for; a terminal's Ctrl-C reaches both anyway.
    """
    interpreter = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    child = subprocess.Popen([*interpreter, "-m", "manyhands.audit.program", json.dumps(settings), *program])

    def forward(number: int, frame: object) -> None:
        if number != signal.SIGINT or not sys.stdin.isatty():
            child.send_signal(number)

    before = {kind: signal.signal(kind, forward) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return child.wait()
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code} without returning to Python (os._exit or exec)"


def _same_end(code: int) -> int:
    """Return the program's exit code; if a signal killed the program, the same signal kills us."""
    if code >= 0:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError, ValueError):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


def _show(report: Report, options: argparse.Namespace) -> None:
    if report.ended == "syntax-error":
        print(f"manyhands audit: {report.program} has a syntax error, so nothing was run", file=sys.stderr)
    elif report.ended != "no-module":  # else the program's process has already reported it
        if report.ended.startswith(("exit", "exception")):
            ended = report.ended.replace("exit", "exit code").replace("exception", "an exception:")
            print(f"manyhands audit: the program ended with {ended}; until then:", file=sys.stderr)
        print(table.text(report), file=sys.stderr)
    try:
        if options.json is not None:
            options.json.write_text(json.dumps(report.as_data(), indent=2) + "\n")
        if options.sarif is not None:
            options.sarif.write_text(json.dumps(sarif.log(report), indent=2) + "\n")
        if options.html is not None:
            options.html.write_text(html.page(report))
    except OSError as error:
        raise BadSettings(f"{error.filename} cannot be written: {error.strerror}") from None
