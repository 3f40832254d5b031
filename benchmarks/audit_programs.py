"""Loops as people write them, audited and cured by hand: what is found, the gain estimated and the gain measured.

    python benchmarks/audit_programs.py                             on a GPU: the table of docs/audit.md
    python benchmarks/audit_programs.py --as-if-gpu --steps 40      a try without a GPU: lines are predicted
    python benchmarks/audit_programs.py --programs book,scaler

The programs are in ``benchmarks/audit_loops``: the book's loop, a GradScaler, torchmetrics, Accelerate and Lightning.
Each runs as it is, with ``--cured`` as its twin without the waits, and under the audit, which estimates the gain of
removing what it found. All processes start together, import and warm up; then one at a time has the machine. The plain
program and its twin make blocks of steps in turns, so that a machine that becomes slower slows both. The real gain is
the median of the blocks' gains; their quartiles stand beside it. A library that is not installed is named, and its
program left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

LOOPS = Path(__file__).parent / "audit_loops"
MARK = "measured: "
# Each program, and what it needs beside PyTorch.
PROGRAMS = {
    "book": None,
    "scaler": None,
    "torchmetrics_loop": "torchmetrics",
    "accelerate_loop": "accelerate",
    "lightning_loop": "lightning",
}
# Estimated and real gain agree within a quarter of each other, or two points of a percent of the step.
PART, POINTS = 0.25, 0.02


class Running:
    """A program that waits for its turns."""

    def __init__(self, command: list[str], turns: str, errors: Path) -> None:
        self._command, self._errors = command, errors
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.open("w"),
            text=True,
            env={**os.environ, "AUDIT_LOOPS_TURNS": turns},
        )

    def until_ready(self) -> dict[str, Any] | None:
        """Wait until it is warm or has made a block; gives its result when it has made all of them."""
        stdout: IO[str] = self._process.stdout  # type: ignore[assignment]
        for line in stdout:
            if line.startswith(MARK):
                text = line.removeprefix(MARK).strip()
                return None if text == "ready" else dict(json.loads(text))
        raise SystemExit(f"{' '.join(self._command)} failed:\n{self._errors.read_text()[-3000:]}")

    def go_on(self) -> dict[str, Any] | None:
        """Its turn: until it is ready for the next one."""
        stdin: IO[str] = self._process.stdin  # type: ignore[assignment]
        stdin.write("go\n")
        stdin.flush()
        return self.until_ready()

    def end(self) -> None:
        self._process.communicate()
        if self._process.returncode:
            raise SystemExit(f"{' '.join(self._command)} failed:\n{self._errors.read_text()[-3000:]}")


class Program:
    """A loop as it is, its twin, and its audit."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        self.name, self._options, self._report = name, options, folder / f"{name}.json"
        program = [str(LOOPS / f"{name}.py"), "--steps", str(options.steps), "--warmup", str(options.warmup)]
        program += ["--batch-size", str(options.batch_size)]
        audit = ["-m", "manyhands", "audit", "--warmup", str(options.warmup), "--json", str(self._report)]
        audit += ["--as-if-gpu"] if options.as_if_gpu else []
        self.plain = Running(program, "blocks", folder / f"{name}-plain.err")
        self.cured = Running([*program, "--cured"], "blocks", folder / f"{name}-cured.err")
        self.audit = Running([*audit, *program], "all", folder / f"{name}-audit.err")
        self.processes = (self.plain, self.cured, self.audit)

    def measure(self) -> tuple[list[float], list[float], bool]:
        """Seconds of a step in each block, as it is and cured, in turns; and whether both end with the same weights."""
        results: list[dict[str, Any] | None] = [None, None]
        turn = 0
        while None in results:
            for number in (0, 1) if turn % 2 == 0 else (1, 0):
                if results[number] is None:
                    results[number] = (self.plain, self.cured)[number].go_on()
            turn += 1
        plain, cured = (dict(result or {}) for result in results)
        return plain["seconds"], cured["seconds"], plain["weights"] == cured["weights"]

    def audited(self) -> dict[str, Any]:
        """The audit's report."""
        self.audit.go_on()
        self.audit.end()
        return dict(json.loads(self._report.read_text()))

    def row(self) -> str:
        """Its row of the table."""
        report = self.audited()
        plain, cured, equal = self.measure()
        places = dict.fromkeys(f"`{Path(f['file']).name}:{f['line']}` {f['kind']}" for f in report["findings"])
        gains = [1 - late / early for early, late in zip(plain, cured, strict=True)]
        low, _, high = statistics.quantiles(gains, n=4)
        real, gain, step = statistics.median(gains), report["gain"], report["step_seconds"]
        known = gain is not None and not self._options.as_if_gpu
        cells = (
            self.name.removesuffix("_loop"),
            "; ".join(places) or "nothing",
            f"{statistics.median(plain) * 1e3:.2f} ms",
            f"{statistics.median(cured) * 1e3:.2f} ms",
            "-" if report["busy"] is None else f"{report['busy']:.0%}",
            "-" if gain is None else f"{report['cost'] * step * 1e3:.2f} ms",
            "-" if gain is None else f"{gain * step * 1e3:.2f} ms, {gain:.1%}",
            f"{real:.1%} ({low:.1%} to {high:.1%})",
            "-" if not known else "yes" if agree(gain, real) else "no",
            "equal" if equal else "other",
        )
        return f"| {' | '.join(cells)} |"


def agree(estimated: float, real: float) -> bool:
    return abs(estimated - real) <= max(POINTS, PART * max(estimated, real))


def table(names: list[str], options: argparse.Namespace, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    programs = [Program(name, options, folder) for name in names]
    for program in programs:
        for process in program.processes:
            process.until_ready()
    print("| program | found | a step | cured | busy | waited | gain estimated | real (quartiles) | agree | weights |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for program in programs:
        print(program.row(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="some of them, with commas between")
    parser.add_argument("--as-if-gpu", action="store_true", help="predict the findings without a GPU")
    parser.add_argument("--steps", type=int, default=160, help="in blocks of 20")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--reports", type=Path, help="a folder to keep the audits' JSON in")
    options = parser.parse_args()
    names = options.programs.split(",")
    for name in names:
        if name not in PROGRAMS:
            raise SystemExit(f"--programs {name}: there are {', '.join(PROGRAMS)}")
    missing = {name: need for name in names if (need := PROGRAMS[name]) and importlib.util.find_spec(need) is None}
    for name, need in missing.items():
        print(f"{name.removesuffix('_loop')} is left out: {need} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        table([name for name in names if name not in missing], options, options.reports or Path(folder))


if __name__ == "__main__":
    main()
