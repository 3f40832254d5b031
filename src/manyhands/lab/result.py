"""The result of an experiment, whether it finished or failed; and the report of all of them as data."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from manyhands.lab.finding import Finding, Trial

SCHEMA = 1
_BUSY = 30.0  # percent of the CPU

Status = Literal["done", "not here", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class Result:
    """``why``: the reason if it did not finish. ``virtual``: the virtual devices that replaced real ones."""

    experiment: str
    question: str
    framework: str
    status: Status
    seconds: float
    finding: Finding | None = None
    trials: Sequence[Trial] = ()
    virtual: Sequence[str] = ()
    why: str = ""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Result:
        finding = None if data["finding"] is None else Finding.from_data(data["finding"])
        return cls(**{**data, "finding": finding, "trials": [Trial(**trial) for trial in data["trials"]]})


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

    @property
    def warning(self) -> str | None:
        """A warning about the times if other programs were running, or None."""
        load = self.host.get("load_percent", 0.0)
        if load <= _BUSY:
            return None
        return (
            f"Other programs kept {load:.0f}% of the CPU busy when this began: times, and what is concluded from them, "
            "may be wrong."
        )

    def as_data(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Report:
        fields = {name: value for name, value in data.items() if name != "schema"}
        return cls(**{**fields, "results": [Result.from_data(result) for result in data["results"]]})


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
