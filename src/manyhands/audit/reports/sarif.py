"""The report as SARIF 2.1.0: code-scanning annotations."""

from __future__ import annotations

from typing import Any

from manyhands import __version__
from manyhands.audit.kinds import Kind
from manyhands.audit.reports.report import Finding, Report
from manyhands.audit.reports.seconds import seconds


def log(report: Report) -> dict[str, Any]:
    """One run with one result per finding."""
    framework = report.frameworks[0] if report.frameworks else "torch"
    rules = [
        {
            "id": kind.value,
            "shortDescription": {"text": kind.title},
            "help": {"text": kind.cure_in(framework)},
            "defaultConfiguration": {"level": "warning"},
        }
        for kind in Kind
    ]
    driver = {
        "name": "manyhands audit",
        "version": __version__,
        "rules": rules,
    }
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_result(finding, report) for finding in report.findings]}],
    }


def _result(finding: Finding, report: Report) -> dict[str, Any]:
    steps = report.counted_steps or 1
    predicted = " (predicted)" if report.predicted else ""
    gain = ""
    if finding.gained is not None:
        gain = f" Removing it gains {seconds(finding.gained / steps)}."
    text = (
        f"{finding.what[0].upper()}{finding.what[1:]}: {seconds(finding.waited / steps)} a step{predicted}.{gain} "
        f"Cure: {finding.cure}"
    )
    region = {"startLine": finding.line, "snippet": {"text": finding.source}}
    location = {"artifactLocation": {"uri": finding.file.replace("\\", "/")}, "region": region}
    return {
        "ruleId": finding.kind,
        "level": "note" if finding.moves else "warning",
        "message": {"text": text},
        "locations": [{"physicalLocation": location}],
    }
