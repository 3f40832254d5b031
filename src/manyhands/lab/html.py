"""The report as one self-contained page: no network, light and dark, readable on a phone."""

from __future__ import annotations

from html import escape

from manyhands.audit.reports.html import page_of
from manyhands.lab import plots
from manyhands.lab.finding import Table
from manyhands.lab.result import Report, Result

_STYLE = """
.card { border-top: 1px solid var(--line); margin-top: 2rem; }
.conclusion { font-weight: 600; } .failed { color: var(--wait); font-weight: 600; }
nav li { margin: 0.2rem 0; } caption { text-align: left; font-weight: 600; padding: 0.4rem; }
"""


def page(report: Report) -> str:
    """The whole file."""
    results = report.results
    title = "manyhands lab"
    contents = "".join(
        f'<li><a href="#{_anchor(result)}">{escape(result.question)}</a> '
        f'<span class="small">{escape(_summary(result))}</span></li>'
        for result in results
    )
    body = [
        f"<h1>{title}</h1>",
        *(f'<p class="small">{escape(line)}</p>' for line in facts(report)),
        f"<nav><ol>{contents}</ol></nav>" if len(results) > 1 else "",
        *(_card(result) for result in results),
    ]
    return page_of(title, "\n".join(part for part in body if part), _STYLE + plots.STYLE)


def facts(report: Report) -> list[str]:
    """Where and when the report was made, as lines of text."""
    host = report.host
    cores = f"{host['usable_cores']} of {host['cores']} cores" if "cores" in host else ""
    lines = [f"{report.date}, manyhands {report.manyhands}{', quick (small sizes)' if report.quick else ''}"]
    lines.append(f"{host.get('name', 'unknown processor')}, {cores}")
    if report.warning is not None:
        lines.append(report.warning)
    for framework in report.frameworks:
        devices = ", ".join(f"{row['device']} ({row['name']})" for row in framework.get("devices", []))
        lines.append(f"{framework['framework']} {framework.get('version', '')}: {devices}")
    return lines


def _card(result: Result) -> str:
    parts = [
        f'<section class="card" id="{_anchor(result)}"><h2>{escape(result.question)}</h2>',
        f'<p class="small">{escape(result.experiment)}, {result.framework}, {result.seconds:.0f} s</p>',
    ]
    if result.why:
        kind = "failed" if result.status == "failed" else "small"
        parts.append(f'<p class="{kind}">{escape(result.status)}: {escape(result.why)}</p>')
    if result.finding is not None:
        parts.append(f'<p class="conclusion">{escape(result.finding.conclusion)}</p>')
        parts += [plots.svg(plot) for plot in result.finding.plots]
        parts += [_table(table) for table in result.finding.tables]
        parts += [f'<p class="small">{escape(note)}</p>' for note in result.finding.notes]
    return "".join(parts) + "</section>"


def _table(table: Table) -> str:
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    heads = "".join(f"<th{_class(position)}>{escape(header)}</th>" for position, header in enumerate(table.headers))
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td{_class(position)} data-name="{escape(header)}">{escape(cell)}</td>'
            for position, (header, cell) in enumerate(zip(table.headers, row, strict=True))
        )
        + "</tr>"
        for row in table.rows
    )
    return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _class(position: int) -> str:
    return ' class="figure"' if position else ""


def _anchor(result: Result) -> str:
    return f"{result.experiment}-{result.framework}"


def _summary(result: Result) -> str:
    return result.framework if result.status == "done" else f"{result.framework}, {result.status}"
