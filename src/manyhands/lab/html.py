"""The report as one self-contained page: no network, light and dark, readable on a phone."""

from __future__ import annotations

import base64
from html import escape

from manyhands.audit.reports.html import page_of
from manyhands.lab import plots
from manyhands.lab.finding import Plot, Table
from manyhands.lab.result import Report, Result

_STYLE = """
.card { border-top: 1px solid var(--line); margin-top: 2rem; }
.conclusion { font-weight: 600; } .failed { color: var(--wait); font-weight: 600; }
nav li { margin: 0.2rem 0; } caption { text-align: left; font-weight: 600; padding: 0.4rem; }
img { width: 100%; max-width: 46rem; display: block; margin: 0.5rem 0 1.5rem; }
"""


def page(report: Report) -> str:
    """The whole file."""
    title, results = "manyhands lab", report.results
    contents = "".join(
        f'<li><a href="#{_anchor(result)}">{escape(result.question)}</a> '
        f'<span class="small">{result.framework}{"" if result.status == "done" else f", {result.status}"}</span></li>'
        for result in results
    )
    body = [
        f"<h1>{title}</h1>",
        *(f'<p class="small">{escape(line)}</p>' for line in _facts(report)),
        f"<nav><ol>{contents}</ol></nav>" if len(results) > 1 else "",
        *(_card(result) for result in results),
    ]
    return page_of(title, "\n".join(part for part in body if part), _STYLE)


def _facts(report: Report) -> list[str]:
    """Where and when the report was made."""
    host = report.host
    cores = f"{host['usable_cores']} of {host['cores']} cores" if "cores" in host else ""
    lines = [f"{report.date}, manyhands {report.manyhands}{', quick (small sizes)' if report.quick else ''}"]
    lines.append(f"{host.get('name', 'unknown processor')}, {cores}")
    for framework in report.frameworks:
        devices = ", ".join(f"{row['device']} ({row['name']})" for row in framework.get("devices", []))
        lines.append(f"{framework['framework']} {framework.get('version', '')}: {devices}")
    return lines


def _card(result: Result) -> str:
    parts = [
        f'<section class="card" id="{_anchor(result)}"><h2>{escape(result.question)}</h2>',
        f'<p class="small">{escape(result.experiment)}, {result.framework}, {result.seconds:.0f} s. '
        f"{escape(result.exercise)}</p>",
    ]
    if result.why:
        kind = "failed" if result.status == "failed" else "small"
        parts.append(f'<p class="{kind}">{escape(result.status)}: {escape(result.why)}</p>')
    if result.finding is not None:
        parts.append(f'<p class="conclusion">{escape(result.finding.conclusion)}</p>')
        parts += [_image(plot) for plot in result.finding.plots]
        parts += [_table(table) for table in result.finding.tables]
        parts += [f'<p class="small">{escape(note)}</p>' for note in result.finding.notes]
    return "".join(parts) + "</section>"


def _image(plot: Plot) -> str:
    """As an image, so that the page's style does not affect it."""
    data = base64.b64encode(plots.svg(plot).encode()).decode()
    caption = f'<p class="small">{escape(plot.title)}</p>' if plot.kind == "drawing" else ""
    return f'{caption}<img alt="{escape(plot.title)}" src="data:image/svg+xml;base64,{data}">'


def _table(table: Table) -> str:
    def cells(tag: str, texts: list[str], names: list[str]) -> str:
        kinds = ["", *[' class="figure"'] * (len(texts) - 1)]
        return "".join(
            f'<{tag}{kind} data-name="{escape(name)}">{escape(text)}</{tag}>'
            for kind, text, name in zip(kinds, texts, names, strict=True)
        )

    headers = list(table.headers)
    rows = "".join(f"<tr>{cells('td', list(row), headers)}</tr>" for row in table.rows)
    head = f"<caption>{escape(table.title)}</caption><thead><tr>{cells('th', headers, headers)}</tr></thead>"
    return f"<table>{head}<tbody>{rows}</tbody></table>"


def _anchor(result: Result) -> str:
    return f"{result.experiment}-{result.framework}"
