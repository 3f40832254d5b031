"""``manyhands audit``: every hidden wait and copy of a program, with its line, its cost, its gain and the cure."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Any

from manyhands.audit import speeds as known_speeds
from manyhands.audit.reports import html as html_report
from manyhands.audit.reports import report as reports
from manyhands.audit.reports import sarif as sarif_report
from manyhands.audit.reports import table
from manyhands.audit.reports.report import SCHEMA, Report
from manyhands.cli import flags
from manyhands.cli.flags import Count, File, Reads, Rest
from manyhands.errors import BadSettings
from manyhands.files import check_writable

WAITS_TOO_LONG = 3


def _percent(text: str) -> float:
    return flags.number(text.removesuffix("%")) / 100


def run(
    program: Annotated[Rest, Reads(nargs=argparse.REMAINDER, metavar="SCRIPT ...")],
    *,
    warmup: Annotated[int, Reads(type=flags.whole_number(0), metavar="N")] = 5,
    steps: Count | None = None,
    as_if_gpu: bool = False,
    speeds: File | None = None,
    json: File | None = None,
    sarif: File | None = None,
    html: File | None = None,
    fail_over: Annotated[float, Reads(type=_percent, metavar="P%")] | None = None,
    baseline: File | None = None,
    module: Annotated[Rest, Reads(nargs=argparse.REMAINDER, flag="-m")] | None = None,
) -> int:
    """Runs a program unchanged and ends with a table on stderr, most expensive wait first.

    The exit code is the program's; 3 if the program succeeds and --fail-over is exceeded. A comment
    `# manyhands: wait-ok <reason>` on a line silences it. docs/audit.md lists what is detected.

    Args:
        program: A script, with its arguments.
        warmup: Leave out the first N steps. Default: 5.
        steps: Stop after N counted steps. Default: run to the end.
        as_if_gpu: Predict without a GPU: a virtual device stands in for one. Default: audit the GPU.
        speeds: Output of `manyhands devices --measure --json` on the GPU that --as-if-gpu predicts. Default: an H200's.
        json: Write the report as JSON (docs/audit.md). Default: no file.
        sarif: Write the findings as SARIF, for code scanning. Default: no file.
        html: Write the report as one HTML page. Default: no file.
        fail_over: Exit with 3 if removing the findings gains more than P% of a step. Default: never.
        baseline: Report only findings that this earlier --json report lacks. Default: all.
        module: Run a module as a program, with its arguments. Default: a script.
    """
    program = module or program
    if not program:
        raise BadSettings("audit needs a program: manyhands audit train.py, or manyhands audit -m package.train")
    if module is None and not Path(program[0]).is_file():
        raise BadSettings(f"there is no file {program[0]!r} to audit")
    if speeds is not None and not as_if_gpu:
        raise BadSettings("--speeds is for predictions: give --as-if-gpu, too")
    target = (known_speeds.h200() if speeds is None else known_speeds.load(speeds)) if as_if_gpu else None
    before = None if baseline is None else _baseline(baseline)
    for path in filter(None, (json, sarif, html)):
        check_writable(path, BadSettings)
    settings = {"program": program[0], "module": module is not None, "warmup": warmup, "steps": steps}
    code, report = _run_program({**settings, "speeds": None if target is None else asdict(target)}, program)
    if report is None:
        killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        ended = killed or f"ended with code {code} without returning to Python (os._exit or exec)"
        print(f"manyhands audit: {program[0]} {ended}: no report", file=sys.stderr)
        return _same_end(code)
    if before is not None:
        report = reports.new_since(report, before)
    _show(report)
    if json is not None:
        json.write_text(dumps(report.as_data(), indent=2) + "\n")
    if sarif is not None:
        sarif.write_text(dumps(sarif_report.log(report), indent=2) + "\n")
    if html is not None:
        html.write_text(html_report.page(report))
    if code == 2 or "--as-if-gpu" in program:  # 2: as argparse ends
        flags.hint_misplaced("audit", program, run)
    return _same_end(code) if fail_over is None else _check_limit(report, fail_over, code)


def _baseline(path: Path) -> Report:
    try:
        data = loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        return Report.from_data(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadSettings(f"--baseline {path} is not a report of `manyhands audit --json`: {error}") from None


def _run_program(settings: dict[str, Any], program: Sequence[str]) -> tuple[int, Report | None]:
    """Run the program in a separate process, with our stdin, stdout and stderr; returns its exit status and the report.

    Signals go on to the program, which they are meant for; a terminal's Ctrl-C reaches both anyway.
    """
    interpreter = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="manyhands-audit-") as folder:
        result = Path(folder) / "result.json"
        text = dumps({**settings, "result": str(result)})
        child = subprocess.Popen([*interpreter, "-m", "manyhands.audit.program", text, *program])

        def forward(number: int, frame: object) -> None:
            if number != signal.SIGINT or not sys.stdin.isatty():
                child.send_signal(number)

        before = {kind: signal.signal(kind, forward) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            code = child.wait()
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
        return code, Report.from_data(loads(result.read_text())) if result.is_file() else None


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


def _show(report: Report) -> None:
    if report.ended == "syntax-error":
        print(f"manyhands audit: {report.program} has a syntax error, so nothing was run", file=sys.stderr)
    elif report.ended != "no-module":  # else the program's process has already reported it
        if report.ended.startswith(("exit", "exception")):
            ended = report.ended.replace("exit", "exit code").replace("exception", "an exception:")
            print(f"manyhands audit: the program ended with {ended}; until then:", file=sys.stderr)
        print(table.text(report), file=sys.stderr)


def _check_limit(report: Report, fail_over: float, code: int) -> int:
    """The exit code where there is a limit of what the findings may cost."""
    if code == 0 and (report.gain or 0.0) > fail_over:
        limit = f"more than the {fail_over:.1%} of --fail-over"
        print(f"manyhands audit: removing the findings gains {report.gain:.1%}, {limit}", file=sys.stderr)
        return WAITS_TOO_LONG
    if report.gain is None and report.findings:
        why = "the time of a step is unknown here, so there is nothing to compare with (docs/audit.md)"
        print(f"manyhands audit: --fail-over was not applied: {why}", file=sys.stderr)
    return _same_end(code)
