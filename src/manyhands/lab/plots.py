"""Draws a plot as SVG: small, without a dependency, readable on a phone, light and dark by CSS variables."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from html import escape

from manyhands.amounts import seconds
from manyhands.lab.finding import Plot

# Colours that can be told apart without red and green (after Okabe and Ito), on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#00805d", "#a8538c", "#8a6d00", "#2f8fc4", "#6b4fa0", "#666666")
_DARK = ("#56b4e9", "#ff9d4d", "#3ccf9f", "#e59ac4", "#e6c645", "#8fd0ff", "#b7a1ee", "#bbbbbb")
STYLE = (
    "svg.plot { --ink: #222; --faint: #8886; "
    + " ".join(f"--c{number}: {colour};" for number, colour in enumerate(COLOURS))
    + " }\n@media (prefers-color-scheme: dark) { svg.plot { --ink: #eee; --faint: #aaa6; "
    + " ".join(f"--c{number}: {colour};" for number, colour in enumerate(_DARK))
    + " } }\nsvg.plot { width: 100%; max-width: 34rem; height: auto; display: block; margin: 0.5rem 0 1.5rem; }\n"
    "svg.plot text { font: 13px system-ui, sans-serif; fill: var(--ink); }\n"
    "svg.plot .small { font-size: 11.5px; }\n"
    "svg.plot .title { font-weight: 600; }\n"
)
_WIDTH = 480
_TITLE = 18  # height of a line of text
_FEW = 8  # up to this many figures, an axis shows the measured figures themselves
# The approximate width of a letter in the widest of the usual fonts, to decide where to break lines. Titles are bold.
_LETTER, _BOLD_LETTER, _WIDE_LETTER = 6.6, 8.4, 11.5


def svg(plot: Plot, *, alone: bool = False) -> str:
    """The plot as SVG; ``alone``: as a separate file that includes its style."""
    title = _wrapped(plot.title, _WIDTH)
    drawn = {"bar": _bars, "line": _lines, "timeline": _timeline, "drawing": _drawing}[plot.kind](
        plot, len(title) * _TITLE + 10
    )
    body, height = drawn
    head = [
        f'<text class="title" x="0" y="{13 + row * _TITLE}">{escape(text)}</text>' for row, text in enumerate(title)
    ]
    style = f"<style>{STYLE}</style>" if alone else ""
    space = ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
    return (
        f'<svg class="plot"{space} viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(plot.title)}">'
        f"{style}{''.join(head)}{''.join(body)}</svg>"
    )


def _bars(plot: Plot, top: float) -> tuple[list[str], float]:
    """Horizontal bars under the name of their group, each with its figure; raw figures as dots."""
    body, y = _legend(plot, top) if len(plot.series) > 1 else ([], top)
    raw = [figure for series in plot.series for figures in series.spread for figure in figures]
    figures = [figure for series in plot.series for figure in series.y]
    axis = _Axis([*figures, *raw, *(bound.value for bound in plot.bounds)], (0, _WIDTH - 70), plot.log_y, zero=True)
    groups = plot.series[0].x if plot.series else ()
    for position, group in enumerate(groups):
        body.append(f'<text x="0" y="{y + 13}">{escape(str(group))}</text>')
        y += _TITLE
        begin = y
        for number, series in enumerate(plot.series):
            width = max(1.0, axis.place(series.y[position]))
            body.append(f'<rect x="0" y="{y:.1f}" width="{width:.1f}" height="16" fill="var(--c{number % 8})"/>')
            dots = series.spread[position] if series.spread else ()
            body += [f'<circle cx="{axis.place(dot):.1f}" cy="{y + 8:.1f}" r="2" fill="var(--ink)"/>' for dot in dots]
            end = max([width, *(axis.place(dot) for dot in dots)]) + 6
            text = _figure(series.y[position], plot)
            body.append(f'<text class="small" x="{end:.1f}" y="{y + 12:.1f}">{text}</text>')
            y += 18
        # Only beside the bars: lines through the names would make them unreadable.
        places = [axis.place(bound.value) for bound in plot.bounds]
        body += [_dashed(x, begin - 2, x, y) for x in places]
        y += 8
    for bound in plot.bounds:
        x = axis.place(bound.value)
        body.append(_dashed(x, y - 6, x, y + 2))
        text = escape(f"{bound.name}: {_figure(bound.value, plot)}")
        side = "end" if x > _WIDTH / 2 else "start"
        body.append(f'<text class="small" x="{x:.1f}" y="{y + 13:.1f}" text-anchor="{side}">{text}</text>')
        y += 15
    if plot.y_label:
        body.append(f'<text class="small" x="0" y="{y + 14:.1f}">{escape(plot.y_label)}</text>')
        y += _TITLE
    return body, y + 6


def _lines(plot: Plot, top: float) -> tuple[list[str], float]:
    body, top = _legend(plot, top)
    if plot.y_label:
        body.append(f'<text class="small" x="0" y="{top + 12}">{escape(plot.y_label)}</text>')
        top += _TITLE
    left, right, bottom = 58.0, _WIDTH - 14.0, top + 230.0
    values = [figure for series in plot.series for figure in series.y]
    values += [bound.value for bound in plot.bounds]
    down = _Axis(values, (bottom, top + 8), plot.log_y, zero=not plot.log_y)
    across = _Axis([float(x) for series in plot.series for x in series.x], (left, right), plot.log_x)
    for tick in down.ticks():
        y = down.place(tick)
        body.append(f'<path d="M{left} {y:.1f}H{right}" stroke="var(--faint)"/>')
        body.append(
            f'<text class="small" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{_figure(tick, plot)}</text>'
        )
    measured = sorted({float(x) for series in plot.series for x in series.x})
    for tick in measured if len(measured) <= _FEW else across.ticks():
        x = across.place(tick)
        body.append(f'<path d="M{x:.1f} {bottom}v4" stroke="var(--ink)"/>')
        body.append(f'<text class="small" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{_number(tick)}</text>')
    for number, series in enumerate(plot.series):
        colour = f"var(--c{number % 8})"
        pairs = [(float(x), y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(y)]
        points = [(across.place(x), down.place(y)) for x, y in pairs]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>' for x, y in points]
    for bound in plot.bounds:
        y = down.place(bound.value)
        text = escape(f"{bound.name}: {_figure(bound.value, plot)}")
        body.append(_dashed(left, y, right, y))
        body.append(f'<text class="small" x="{right}" y="{y - 4:.1f}" text-anchor="end">{text}</text>')
    if plot.x_label:
        middle = (left + right) / 2
        label = escape(plot.x_label)
        body.append(f'<text class="small" x="{middle}" y="{bottom + 35}" text-anchor="middle">{label}</text>')
    return body, bottom + 44


def _timeline(plot: Plot, top: float) -> tuple[list[str], float]:
    """A row for each lane, a box for each span, coloured by its name."""
    lanes = list(dict.fromkeys(span.lane for span in plot.spans))
    names = list(dict.fromkeys(span.name for span in plot.spans))
    body, top = _key(names, top)
    begin = min((span.start for span in plot.spans), default=0.0)
    end = max((span.stop for span in plot.spans), default=1.0)
    across = _Axis([0.0, (end - begin) or 1.0], (0, _WIDTH - 24), False)
    y = top
    for lane in lanes:
        body.append(f'<text class="small" x="0" y="{y + 11:.1f}">{escape(lane)}</text>')
        y += 15
        for span in plot.spans:
            if span.lane == lane:
                x, stop = across.place(span.start - begin), across.place(span.stop - begin)
                text = escape(f"{span.name}: {seconds(span.stop - span.start)}")
                colour = f"var(--c{names.index(span.name) % 8})"
                box = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.7, stop - x):.1f}" height="18"'
                body.append(f'<rect {box} fill="{colour}" fill-opacity="0.85"><title>{text}</title></rect>')
        y += 26
    for tick in across.ticks():
        x = across.place(tick)
        body.append(f'<path d="M{x:.1f} {top}V{y:.1f}" stroke="var(--faint)"/>')
        anchor, text = ("start" if x < 20 else "middle"), (seconds(tick) if tick else "0")
        body.append(f'<text class="small" x="{x:.1f}" y="{y + 13:.1f}" text-anchor="{anchor}">{text}</text>')
    return body, y + 22


def _drawing(plot: Plot, top: float) -> tuple[list[str], float]:
    """The drawing as a nested image, so that the page's style does not affect it; scaled down if it is too wide."""
    size = re.search(r'<svg[^>]*\bwidth="([\d.]+)"[^>]*\bheight="([\d.]+)"', plot.drawing)
    assert size is not None, "a drawing says its width and height"
    width, height = map(float, size.groups())
    scale = min(1.0, _WIDTH / width)
    data = base64.b64encode(plot.drawing.encode()).decode()
    box = f'x="0" y="{top}" width="{width * scale:.1f}" height="{height * scale:.1f}"'
    return [f'<image {box} href="data:image/svg+xml;base64,{data}"/>'], top + height * scale + 6


class _Axis:
    """The position of each figure, and the figures that get a grid line."""

    def __init__(self, values: Sequence[float], ends: tuple[float, float], log: bool, *, zero: bool = False) -> None:
        usable = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
        self.low, self.high = (0.0 if zero and not log else min(usable)), max(usable)
        if log and zero:  # bars need a length
            self.low /= 2
        if self.low >= self.high:
            self.low, self.high = (self.low / 2, self.high * 2) if log else (min(0.0, self.low), self.high or 1.0)
        self.ends, self.log = ends, log

    def place(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        part = (self._scaled(value) - low) / (high - low)
        return self.ends[0] + min(1.0, max(0.0, part)) * (self.ends[1] - self.ends[0])

    def ticks(self) -> list[float]:
        if not self.log:
            step = _nice((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5)):  # as few lines as possible, but at least three
            ticks = [step * 10.0**decade for decade in decades for step in steps]
            ticks = [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]
            if len(ticks) >= 3:
                break
        return ticks or [self.low, self.high]

    def _scaled(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.log else value


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(nice for nice in (1, 2, 2.5, 5, 10) if nice >= step / power * 0.999)


def _legend(plot: Plot, top: float) -> tuple[list[str], float]:
    return _key([series.name for series in plot.series], top)


def _key(names: Sequence[str], top: float) -> tuple[list[str], float]:
    """The legend, in as many rows as it needs; also returns where the plot may begin."""
    body, x, y = [], 0.0, top
    for number, name in enumerate(names):
        wide = sum(letter in "mwMW" for letter in name)
        width = 26 + _LETTER * (len(name) - wide) + _WIDE_LETTER * wide
        if x and x + width > _WIDTH:
            x, y = 0.0, y + _TITLE
        body.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="11" height="11" fill="var(--c{number % 8})"/>')
        body.append(f'<text class="small" x="{x + 16:.1f}" y="{y + 10:.1f}">{escape(name)}</text>')
        x += width
    return body, y + _TITLE + 4 if names else y


def _dashed(x: float, y: float, to_x: float, to_y: float) -> str:
    ends = f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"
    return f'<path d="{ends}" stroke="var(--ink)" stroke-width="1.5" stroke-dasharray="5 4"/>'


def _figure(value: float, plot: Plot) -> str:
    if plot.unit == "s":
        return "0" if value == 0 else seconds(value)
    return f"{_number(value)} {plot.unit}".strip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _wrapped(text: str, width: float) -> list[str]:
    """Lines that fit, broken between words."""
    lines, letters = [""], int(width / _BOLD_LETTER)
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > letters:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
