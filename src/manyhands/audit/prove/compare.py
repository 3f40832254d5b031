"""Run the second passes of ``--prove``, compare what they computed, and say what the cures gained."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.amounts import counted
from manyhands.audit.critical_path import Wait, Work, simulate
from manyhands.audit.prove import plan
from manyhands.audit.prove.plan import Choice, Way
from manyhands.audit.prove.rewrite import Change
from manyhands.audit.reports.proof import Proof, ProvenLine
from manyhands.audit.reports.report import Finding, Report

MOST_STEPS = 50
_PLAIN, _CURED = "plain", "cured"
# Why the gain cannot be measured where the CPU stands in for a GPU; JAX and MXNet compute asynchronously there, too.
_NOT_MEASURED_ON_CPU = {
    "torch": "the gain is not measured: PyTorch computes synchronously on a CPU, so nothing waits",
    "tensorflow": "the gain is not measured: TensorFlow computes synchronously on a CPU, so nothing waits",
}
_MOST_FAILURES = 4  # of the cured program, each with other lines kept as they are
# Runs one pass with these settings; returns the last line that it wrote to stderr.
Start = Callable[[dict[str, Any]], str]


@dataclass(frozen=True)
class Steps:
    """What a pass runs: steps that do not count, steps that do, and the line whose runs are steps (or None)."""

    warmup: int
    steps: int
    clock: int | None


def prove(report: Report, record: dict[str, Any] | None, warmup: int, folder: Path, start: Start) -> Proof:
    """Prove the findings of a report: ``record`` is what :func:`..reports.report.make` kept for it."""
    if not report.findings:
        return Proof(failed="there are no findings to cure")
    choices = [(finding, plan.choose(finding)) for finding in report.findings]
    proof = Proof(lines=[_line(finding, choice) for finding, choice in choices])
    changes = _changes(choices)
    if not changes:
        proof.failed = "no finding can be cured by rewriting its line; nothing was run again"
        return proof
    length = _steps(report, warmup, changes)
    if length is None:
        proof.failed = "the program made too few steps to compare"
        return proof
    proof.measured_on, reason = _where(report)
    passes = _Passes(report, changes, length, folder, start)
    order = [_PLAIN, _CURED, _CURED, _PLAIN] if proof.measured_on is not None else [_PLAIN, _CURED]
    if reason is not None:
        proof.remarks.append(reason)
    for mode in order:
        error = passes.run(mode)
        if error is not None and passes.shorten():
            error = passes.run(mode)
        while error is not None and mode == _CURED and passes.keep_culprits():
            error = passes.run(mode)
        if error is not None:
            proof.failed = error
            return proof
    _fill(proof, passes, choices, changes)
    if record is not None and report.gain is not None:
        proof.estimated = estimate(
            record, [f for f, line in zip(report.findings, proof.lines, strict=True) if line.way != "kept"]
        )
    return proof


def _line(finding: Finding, choice: Choice) -> ProvenLine:
    return ProvenLine(finding.file, finding.line, finding.kind, choice.way.value, choice.why)


def _changes(choices: Sequence[tuple[Finding, Choice]]) -> list[Change]:
    """One change for every line with findings that can be cured."""
    changes: dict[tuple[str, int], Change] = {}
    for finding, choice in choices:
        if choice.way is Way.KEPT:
            continue
        key = os.path.abspath(finding.file), finding.line
        ways = (*(changes[key].ways if key in changes else ()), choice.way)
        cure = finding.cure if choice.way is Way.REWRITTEN else ""
        changes[key] = Change(*key, tuple(dict.fromkeys(ways)), cure)
    return list(changes.values())


def _steps(report: Report, warmup: int, changes: Sequence[Change]) -> Steps | None:
    if report.counted_steps:
        first = report.steps - report.counted_steps
        return (
            Steps(max(1, first), min(MOST_STEPS, report.counted_steps - (first == 0)), None)
            if report.steps > 1
            else None
        )
    counts = {
        number: max(f.count for f in report.findings if (os.path.abspath(f.file), f.line) == (change.file, change.line))
        for number, change in enumerate(changes)
        if Way.REWRITTEN not in change.ways
    }
    if not counts:
        return None
    clock = max(counts, key=lambda number: counts[number])
    first = min(max(1, warmup), counts[clock] // 2)
    return Steps(first, min(MOST_STEPS, counts[clock] - first), clock) if first else None


def _where(report: Report) -> tuple[str | None, str | None]:
    """What the gain can be measured on; or why it cannot be measured."""
    if not report.predicted:
        return "gpu", None
    reasons = [_NOT_MEASURED_ON_CPU[name] for name in report.frameworks if name in _NOT_MEASURED_ON_CPU]
    return (None, reasons[0]) if reasons else ("cpu", None)


class _Passes:
    """The passes that were run, with their results."""

    def __init__(self, report: Report, changes: Sequence[Change], length: Steps, folder: Path, start: Start) -> None:
        self._report, self._changes, self._length, self._folder, self._start = report, changes, length, folder, start
        self.results: dict[str, list[dict[str, Any]]] = {_PLAIN: [], _CURED: []}
        self._ticks = 0
        self._culprits: list[int] = []
        self._failures = 0
        self.fails_without: dict[int, str] = {}  # lines that the program fails without, and how

    @property
    def steps(self) -> int:
        return self._length.steps

    def shorten(self) -> bool:
        """Where a line's runs are the steps and it waits several times in a run: take fewer steps, if that helps."""
        length = self._length
        if self.results[_PLAIN] or length.clock is None or self._ticks < 2:
            return False
        first = min(length.warmup, self._ticks // 2)
        self._length = Steps(first, self._ticks - first, length.clock)
        return True

    def keep_culprits(self) -> bool:
        """Leave the lines that made the cured program fail unchanged, if they are known."""
        fresh = [number for number in self._culprits if number not in self.fails_without]
        self._failures += 1
        if self.results[_CURED] or self._failures > _MOST_FAILURES or not fresh:
            return False
        self.fails_without |= dict.fromkeys(fresh, self._said)
        return len(self.fails_without) < len(self._changes)

    def run(self, mode: str) -> str | None:
        """Run one pass; returns why it failed, or None."""
        result = self._folder / f"{mode}-{len(self.results[mode])}.json"
        changes = [
            {
                **dataclasses.asdict(change),
                "ways": [way.value for way in change.ways if mode == _PLAIN or number not in self.fails_without],
            }
            for number, change in enumerate(self._changes)
        ]
        proof = {
            "mode": mode,
            "changes": changes,
            "stand_in": self._report.predicted,
            **dataclasses.asdict(self._length),
        }
        result.unlink(missing_ok=True)
        said = self._said = self._start({"proof": proof, "result": str(result)})
        name = "the original program" if mode == _PLAIN else "the cured program"
        if not result.is_file():
            return f"{name} could not be run again: {said or 'it was killed'}"
        data: dict[str, Any] = json.loads(result.read_text())
        self._ticks, self._culprits = data["ticks"], data.get("culprits", [])
        if data["seconds"] is None:
            steps = self._length.warmup + self._length.steps
            return f"{name} ended before its {counted(steps, 'step')}: {said or data['ended']}"
        self.results[mode].append(data)
        return None

    def seconds(self, mode: str) -> float:
        return statistics.mean(float(data["seconds"]) for data in self.results[mode])

    def spread(self) -> float:
        """How many seconds a step runs of the same program differ by."""
        times = [[float(data["seconds"]) for data in results] for results in self.results.values()]
        return max(max(same) - min(same) for same in times)

    def compare(self) -> str:
        """Whether the cured program computed the same."""
        if not self._differ(self.results[_PLAIN][0], *self.results[_CURED]):
            return "equal"
        if len(self.results[_PLAIN]) < 2 and self.run(_PLAIN) is not None:
            return "not-comparable"
        return "not-comparable" if self._differ(*self.results[_PLAIN]) else "differ"

    def compared(self, data: dict[str, Any]) -> list[Any]:
        """The values of the lines that were cured."""
        return [values for number, values in enumerate(data["values"]) if number not in self.fails_without]

    def _differ(self, first: dict[str, Any], *others: dict[str, Any]) -> bool:
        reference = self.compared(first), first["parameters"]
        return any((self.compared(data), data["parameters"]) != reference for data in others)


def _fill(proof: Proof, passes: _Passes, choices: Sequence[tuple[Finding, Choice]], changes: Sequence[Change]) -> None:
    if proof.measured_on is not None:
        proof.plain_seconds, proof.cured_seconds = passes.seconds(_PLAIN), passes.seconds(_CURED)
        proof.measured = 1 - proof.cured_seconds / proof.plain_seconds
        spread = passes.spread() / proof.plain_seconds
        if spread >= abs(proof.measured):
            proof.remarks.append(
                f"this gain is not certain: runs of the same program differ by {spread:.1%} of a step; prove it on a "
                "quiet machine, or with more steps"
            )
    first = passes.results[_PLAIN][0]
    proof.steps = passes.steps
    proof.values, proof.parameters = sum(count for count, _ in passes.compared(first)), len(first["parameters"])
    proof.results = passes.compare()
    cured = passes.results[_CURED][0]
    for number, change in enumerate(changes):
        needed = cured["needed"][number]
        why = None
        if number in passes.fails_without:
            why = f"the program fails if its value is read late ({passes.fails_without[number]})"
        waits, reads = sum(needed.values()), cured["asked"][number]
        where = max(needed, key=lambda line: needed[line]) if needed else ""
        if why is None and needed and 2 * waits >= reads:
            why = f"its value is needed at {where}, for control flow or by code that takes numbers only"
        for line in proof.lines:
            is_here = (os.path.abspath(line.file), line.line) == (change.file, change.line)
            if why is not None and is_here and (line.way == Way.LATE.value or number in passes.fails_without):
                line.way, line.why = Way.KEPT.value, why
            elif needed and is_here and line.way == Way.LATE.value:
                line.why = f"read late, at {where}: the host waits {counted(waits, 'time')} instead of {reads}"


def estimate(record: dict[str, Any], findings: Sequence[Finding]) -> float | None:
    """The part of a step that removing some findings gains, simulated."""
    timeline = [Work(*item) if len(item) == 3 else Wait(*item) for item in record["timeline"]]
    wanted = {(finding.kind, finding.call, finding.file, finding.line, finding.library) for finding in findings}
    numbers = {number for number, *key in record["keys"] if tuple(key) in wanted}
    if not record["total"]:
        return None
    return max(0.0, simulate(timeline).total - simulate(timeline, numbers).total) / float(record["total"])
