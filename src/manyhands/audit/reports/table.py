"""The report as people read it in a terminal."""

from __future__ import annotations

from manyhands.audit.reports.proof import words
from manyhands.audit.reports.report import Finding, Report
from manyhands.audit.reports.seconds import counted, seconds


def text(report: Report) -> str:
    """Verdict, findings (most expensive first) and notes."""
    lines = [f"manyhands audit: {report.verdict}"]
    if report.findings:
        lines += ["", _HEAD]
        for finding in report.findings:
            lines += _rows(finding, report)
        lines.append("")
    if report.silenced:
        lines.append(f"silenced by comments (manyhands: wait-ok): {counted(report.silenced, 'wait')}")
    if report.known:
        lines.append(f"known from the baseline and not shown: {report.known}")
    lines += report.notes
    if report.proof is not None:
        lines += words(report.proof)
    return "\n".join(lines)


_HEAD = f"{'waited':>9} {'gained':>9} {'per step':>9} {'in all':>7}  where"


def _rows(finding: Finding, report: Report) -> list[str]:
    steps = report.counted_steps or 1
    waited = seconds(finding.waited / steps)
    gained = "moves on" if finding.moves else "-" if finding.gained is None else seconds(finding.gained / steps)
    often = "-" if finding.per_step is None else f"{finding.per_step:.3g}"
    beside = f" (in {finding.library})" if finding.library else ""
    indent = " " * 39
    rows = [
        f"{waited:>9} {gained:>9} {often:>9} {finding.count:>7}  {finding.file}:{finding.line}{beside}",
        f"{indent}{finding.source}",
        f"{indent}{finding.what} ({finding.call})",
        f"{indent}cure: {finding.cure}",
    ]
    return [row for row in rows if row.strip()]  # code that a program made itself has no source text
