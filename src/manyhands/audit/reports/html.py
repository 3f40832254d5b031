"""The report as one self-contained page: verdict, table, a timeline of a few steps, and the source, marked."""

from __future__ import annotations

import linecache
from html import escape

from manyhands.amounts import seconds
from manyhands.audit.reports.report import Finding, Report, TimelinePart

_STYLE = """
:root { color-scheme: light dark; --wait: #d33; --work: #48a; --mark: #d333; --line: #8884; }
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
code, pre { font: 0.85rem/1.5 ui-monospace, monospace; } pre { overflow-x: auto; margin: 0; }
table { border-collapse: collapse; width: 100%; }
td, th { border-bottom: 1px solid var(--line); padding: 0.4rem; text-align: left; vertical-align: top; }
td.figure, th.figure { text-align: right; white-space: nowrap; }
.source { border: 1px solid var(--line); border-radius: 4px; padding: 0.5rem; }
.source mark { background: var(--mark); color: inherit; display: block; }
td code { display: inline-block; min-width: 14rem; overflow-wrap: anywhere; white-space: pre-wrap; }
td[data-name="cure"] { width: 32%; }
.small { font-size: 0.85rem; opacity: 0.8; } svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
@media (max-width: 40rem) {
  .wide > * { min-width: 36rem; }
  thead { display: none; } tr { display: block; padding: 0.5rem 0; border-bottom: 2px solid var(--line); }
  td, td.figure { display: block; border: 0; padding: 0.1rem 0; text-align: left; white-space: normal;
    overflow-wrap: anywhere; }
  td[data-name="cure"] { width: auto; }
  td[data-name]::before { content: attr(data-name) ": "; font-weight: 600; }
}
"""
_AROUND = 3  # lines of source before and after a marked one


def page(report: Report) -> str:
    """The whole file."""
    title = f"manyhands audit: {report.program}"
    parts = [
        f'<h1>{escape(title)}</h1><p id="verdict">{escape(report.verdict)}</p>',
        *(f'<p class="small">{escape(note)}</p>' for note in report.notes + report.remarks()),
        _table(report) if report.findings else "",
        _timeline(report.timeline) if report.timeline else "",
        _sources(report.findings) if report.findings else "",
    ]
    return page_of(title, "\n".join(part for part in parts if part))


def page_of(title: str, body: str, style: str = "") -> str:
    """A self-contained file: light and dark, and on a phone every row of a table is a block."""
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}{style}</style></head><body>\n{body}\n</body></html>\n"
    )


def _table(report: Report) -> str:
    steps = report.counted_steps or 1
    heads = "".join(f'<th class="figure">{name}</th>' for name in report.findings[0].figures(steps))
    rows = []
    for finding in report.findings:
        figures = finding.figures(steps).items()
        cells = [f'<td class="figure" data-name="{name}">{figure}</td>' for name, figure in figures]
        beside = f'<div class="small">in {escape(finding.library)}</div>' if finding.library else ""
        where = f"{escape(finding.file)}:{finding.line}"
        cells.append(f"<td><b>{where}</b>{beside}<div><code>{escape(finding.source)}</code></div></td>")
        cells.append(f"<td>{escape(finding.what)} ({escape(finding.call)})</td>")
        cells.append(f'<td data-name="cure"><code>{escape(finding.cure)}</code></td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = f"<thead><tr>{heads}<th>where</th><th>what</th><th>cure</th></tr></thead>"
    return f"<h2>Findings</h2><table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _timeline(spans: list[TimelinePart]) -> str:
    """Host and device above each other; waits in red."""
    end = max(span.end for span in spans) or 1.0
    boxes = []
    for span in spans:
        x, width = 60 + 930 * span.begin / end, max(0.5, 930 * (span.end - span.begin) / end)
        y = 10 if span.lane == "host" else 50
        colour = "var(--work)" if span.finding is None else "var(--wait)"
        text = escape(f"{span.finding or span.lane}: {seconds(span.end - span.begin)}")
        boxes.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="30" fill="{colour}"><title>{text}</title></rect>'
        )
    labels = '<text x="0" y="30" fill="currentColor">host</text><text x="0" y="70" fill="currentColor">device</text>'
    drawing = f'<svg id="timeline" viewBox="0 0 1000 90" role="img">{labels}{"".join(boxes)}</svg>'
    note = '<p class="small">red: the host waits; simulated</p>'
    return f'<h2>A few steps, {seconds(end)}</h2><div class="wide">{drawing}</div>{note}'


def _sources(findings: list[Finding]) -> str:
    """Every file with findings: the marked lines and a few around them."""
    parts = ["<h2>Source</h2>"]
    for file in dict.fromkeys(finding.file for finding in findings):
        marked = {finding.line for finding in findings if finding.file == file}
        shown = sorted({near for line in marked for near in range(line - _AROUND, line + _AROUND + 1)})
        rows, before = [], 0
        for number in shown:
            text = linecache.getline(file, number)
            if not text:
                continue
            if before and number > before + 1:
                rows.append("   ...\n")
            code = escape(f"{number:4} {text.rstrip()}")
            rows.append(f"<mark>{code}</mark>" if number in marked else f"{code}\n")
            before = number
        parts.append(f'<h3><code>{escape(file)}</code></h3><div class="source"><pre>{"".join(rows)}</pre></div>')
    return "".join(parts)
