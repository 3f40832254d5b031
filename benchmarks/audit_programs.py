"""Loops as people write them, audited and cured by hand: what is found, the gain estimated and the gain measured.

    python benchmarks/audit_programs.py                             on a GPU: the table of docs/audit.md
    python benchmarks/audit_programs.py --as-if-gpu --steps 20      a try without a GPU: lines are predicted
    python benchmarks/audit_programs.py --programs book,scaler

The programs are in ``benchmarks/audit_loops``: the book's loop, a GradScaler, torchmetrics, Accelerate and Lightning.
Each runs as it is and, with ``--cured``, as its twin without the waits. The audit estimates the gain of removing what
it found. The real gain is that of the twin: both run in turns, ``--rounds`` times, and the median of the rounds' gains
is taken; their spread is shown beside it, because a host that does other things makes short steps uncertain. A library
that is not installed is named, and its program left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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


def run(command: list[str]) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def audited(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The report of a program as it is."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["-m", "manyhands", "audit", "--warmup", str(options.warmup), "--json", str(report)]
        run([*command, *(["--as-if-gpu"] if options.as_if_gpu else []), *program(name, options)])
        return dict(json.loads(report.read_text()))


def program(name: str, options: argparse.Namespace, *more: str) -> list[str]:
    return [str(LOOPS / f"{name}.py"), "--steps", str(options.steps), "--warmup", str(options.warmup), *more]


def measured(name: str, options: argparse.Namespace) -> tuple[dict[str, list[float]], bool]:
    """Seconds of a step as it is and cured, in turns; and whether both end with the same weights."""
    times: dict[str, list[float]] = {"": [], "--cured": []}
    weights = set()
    for turn in range(options.rounds):
        for kind in ("", "--cured") if turn % 2 == 0 else ("--cured", ""):
            lines = run(program(name, options, *([kind] if kind else []))).splitlines()
            result = json.loads(next(line for line in lines if line.startswith(MARK)).removeprefix(MARK))
            times[kind].append(result["seconds"])
            weights.add(result["weights"])
    return times, len(weights) == 1


def agree(estimated: float, real: float) -> bool:
    return abs(estimated - real) <= max(POINTS, PART * max(estimated, real))


def row(name: str, options: argparse.Namespace) -> str:
    report = audited(name, options)
    places = dict.fromkeys(
        f"`{Path(finding['file']).name}:{finding['line']}` {finding['kind']}" for finding in report["findings"]
    )
    found = "; ".join(places) or "nothing"
    times, equal = measured(name, options)
    plain, cured = statistics.median(times[""]), statistics.median(times["--cured"])
    rounds = [1 - late / early for early, late in zip(times[""], times["--cured"], strict=True)]
    real, gain = statistics.median(rounds), report["gain"]
    estimated = "-" if gain is None else f"{gain:.1%}"
    verdict = "-" if gain is None or options.as_if_gpu else "yes" if agree(gain, real) else "no"
    weights = "equal" if equal else "other"
    spread = f"{min(rounds):.1%} to {max(rounds):.1%}"
    figures = (
        f"{plain * 1e3:.2f} ms | {cured * 1e3:.2f} ms | {estimated} | {real:.1%} | {spread} | {verdict} | {weights}"
    )
    return f"| {name.removesuffix('_loop')} | {found} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="some of them, with commas between")
    parser.add_argument("--as-if-gpu", action="store_true", help="predict the findings without a GPU")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("| program | found | a step | cured | estimated | real | rounds | agree | weights |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.programs.split(","):
        if name not in PROGRAMS:
            raise SystemExit(f"--programs {name}: there are {', '.join(PROGRAMS)}")
        needs = PROGRAMS[name]
        if needs is not None and importlib.util.find_spec(needs) is None:
            print(f"| {name.removesuffix('_loop')} | not run: {needs} is not installed | | | | | | | |")
            continue
        print(row(name, options), flush=True)


if __name__ == "__main__":
    main()
