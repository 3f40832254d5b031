"""The report as people read it in a terminal."""

from __future__ import annotations

from manyhands.audit.reports.report import Finding, Report


def text(report: Report) -> str:
    """Verdict, findings (most expensive first) and notes."""
    lines = [f"manyhands audit: {report.verdict}"]
    if report.findings:
        lines += ["", _HEAD]
        for finding in report.findings:
            lines += _rows(finding, report)
        lines.append("")
    lines += report.remarks() + report.notes
    return "\n".join(lines)


_HEAD = f"{'waited':>9} {'gained':>9} {'per step':>9} {'in all':>7}  where"


def _rows(finding: Finding, report: Report) -> list[str]:
    waited, gained, per_step, count = finding.figures(report.counted_steps or 1).values()
    beside = f" (in {finding.library})" if finding.library else ""
    indent = " " * 39
    rows = [
        f"{waited:>9} {gained:>9} {per_step:>9} {count:>7}  {finding.file}:{finding.line}{beside}",
        f"{indent}{finding.source}",
        f"{indent}{finding.what} ({finding.call})",
        f"{indent}cure: " + finding.cure.replace("\n", f"\n{indent}      "),
    ]
    return [row for row in rows if row.strip()]  # code that a program made itself has no source text
