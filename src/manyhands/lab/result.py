"""The result of an experiment, whether it finished or failed; and the report of all of them as data."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from manyhands.lab.finding import Finding, Trial

SCHEMA = 2

Status = Literal["done", "not here", "not measured", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class Result:
    """``why``: the reason if it did not finish. ``virtual``: the virtual devices that replaced real ones."""

    experiment: str
    question: str
    exercise: str
    framework: str
    status: Status
    seconds: float = 0.0
    finding: Finding | None = None
    trials: Sequence[Trial] = ()
    virtual: Sequence[str] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The results in the order of their runs, and the machine they were measured on."""

    quick: bool
    host: Mapping[str, Any]
    frameworks: Sequence[Mapping[str, Any]]  # as `manyhands devices --json` lists them
    results: Sequence[Result] = ()
    manyhands: str = ""
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def with_result(self, result: Result) -> Report:
        return replace(self, results=[*self.results, result])

    def as_data(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def marked(finding: Finding, virtual: Sequence[str], framework: str) -> Finding:
    """The same finding; if devices were virtual, every table, plot and conclusion says so."""
    if not virtual:
        return finding
    mark = f"{len(virtual)} virtual devices" if len(virtual) > 1 else "a virtual device"
    tables = [replace(table, title=f"{table.title or 'Times'} ({mark})") for table in finding.tables]
    plots = [replace(plot, title=f"{plot.title} ({mark})") for plot in finding.plots]
    each = "each " if len(virtual) > 1 else ""
    # XLA uses all cores for a product, regardless of its flags.
    part = "with all cores of the CPU, which JAX cannot divide" if framework == "jax" else "one core of the CPU"
    note = f"Measured on {mark} ({each}{part}), because this machine has too few GPUs."
    return replace(finding, conclusion=f"{finding.conclusion} {note}", tables=tables, plots=plots)
