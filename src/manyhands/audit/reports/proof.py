"""What ``--prove`` found out: the gain measured beside the gain estimated, and whether the results are equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from manyhands.amounts import counted, seconds


@dataclass
class ProvenLine:
    """What became of a finding in the cured run."""

    file: str
    line: int
    kind: str
    way: str  # read-late, pinned-copy, removed, rewritten or kept
    why: str


@dataclass
class Proof:
    """The key ``proof`` of ``--json`` (docs/audit.md)."""

    steps: int = 0
    plain_seconds: float | None = None  # of a step, as it is
    cured_seconds: float | None = None
    measured: float | None = None  # the part of a step that the cures gained
    measured_on: str | None = None  # gpu or cpu
    estimated: float | None = None  # the part of a step that the same cures gain by the audit's estimate
    results: str | None = None  # equal, differ, or not-comparable: plain runs differ from each other as well
    values: int = 0  # numbers and texts that were read and compared
    parameters: int = 0  # arrays of weights that were compared
    failed: str | None = None  # why there is no proof
    remarks: list[str] = field(default_factory=list)
    lines: list[ProvenLine] = field(default_factory=list)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Proof:
        return cls(**{**data, "lines": [ProvenLine(**line) for line in data["lines"]]})


def words(proof: Proof) -> list[str]:
    """The proof in a few lines, as the table and the page show it."""
    lines = [_gain(proof)] if proof.failed is None else [f"proof: {proof.failed}"]
    if proof.results is not None:
        lines.append(f"results: {_results(proof)}")
    lines += proof.remarks
    shown = [line for line in proof.lines if proof.failed is None or line.way == "kept"]  # nothing was cured
    return list(dict.fromkeys([*lines, *(f"{line.file}:{line.line}: {_outcome(line)}" for line in shown)]))


def _gain(proof: Proof) -> str:
    lines = len({(line.file, line.line) for line in proof.lines if line.way != "kept"})
    if not lines:
        return f"proof: no line could be cured in the {counted(proof.steps, 'step')} that were run again"
    begin = f"proof: {counted(lines, 'line')} cured for {counted(proof.steps, 'step')}"
    estimated = "not known" if proof.estimated is None else f"{proof.estimated:.1%} of a step"
    if proof.measured is None or proof.plain_seconds is None or proof.cured_seconds is None:
        return f"{begin}; gain estimated: {estimated}, measured: not possible here"
    where = "" if proof.measured_on == "gpu" else " (on this CPU)"
    return (
        f"{begin}; a step took {seconds(proof.plain_seconds)}, cured {seconds(proof.cured_seconds)}; "
        f"gain measured{where}: {proof.measured:.1%} of a step, estimated: {estimated}"
    )


def _results(proof: Proof) -> str:
    what = f"{counted(proof.values, 'value')} that were read and {counted(proof.parameters, 'array')} of weights"
    if proof.results == "equal":
        return f"{what} are equal to the bit"
    if proof.results == "differ":
        return f"{what} were compared, and some differ from those of the original program"
    return (
        f"{what} cannot be compared: two runs of the original program differ too, or one failed (no seed, or "
        "random kernels)"
    )


def _outcome(line: ProvenLine) -> str:
    return f"unchanged: {line.why}" if line.way == "kept" else f"cured: {line.why}"
