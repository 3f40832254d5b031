"""The pictures of README.md and the site: ``make pictures``, or ``python docs/pictures/make.py``.

``two-devices.svg`` is the timeline that ``manyhands lab run how-linear`` draws: measured here, on two GPUs or on two
virtual devices. ``lanes.svg`` shows one function as plain execution runs it and as it is scheduled on four devices;
``graph.svg`` is the graph of a smaller one, by lane. Costs of operations are measured where this is run; the four
devices are simulated. The colours of the first two follow the reader's light or dark mode.

``python docs/pictures/make.py two-devices`` makes that one alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import torch

from manyhands import torch as mh
from manyhands.lab.finding import Plot
from manyhands.lab.report import svg
from manyhands.schedule import graph_svg as graph
from manyhands.schedule.simulate import simulate
from manyhands.schedule.timeline import Span, Timeline, colour_of

FOLDER = Path(__file__).parent
CODE = """@mh.parallel
def branches(x):
    total = 0
    for weight in weights:
        y = x
        for _ in range(5):
            y = relu(y @ weight)
        total = total + y
    return total"""
STYLE = """
  .back { fill: #ffffff; } .panel { fill: #f4f5f7; } .text { fill: #24292f; } .soft { fill: #656d76; }
  .rail { fill: #e7eaee; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117; } .panel { fill: #161b22; } .text { fill: #e6edf3; } .soft { fill: #9198a1; }
    .rail { fill: #21262d; }
  }
  .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12.5px; }
  text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12.5px; }
  .title { font-size: 14px; font-weight: 600; }
"""
NO_BREAK = "\u00a0"  # an SVG viewer leaves out other spaces at the start of a line
LEFT, RIGHT, ROW = 420, 880, 22
WORDS = {"mm": "matrix product", "relu": "relu", "add": "add", "copy": "copy between devices"}


def planned(members: int, layers: int) -> Any:
    torch.manual_seed(0)
    weights = [torch.randn(256, 256) / 16 for _ in range(members)]

    @mh.parallel
    def branches(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for weight in weights:
            y = x
            for _ in range(layers):
                y = torch.relu(y @ weight)
            total = total + y
        return total

    branches(torch.randn(256, 256))
    return branches


def rows(timeline: Timeline, lanes: dict[str, str], top: float, scale: float) -> Iterator[str]:
    """A rail with bars for every lane."""
    begin = min(span.start for span in timeline.spans)
    for number, (lane, label) in enumerate(lanes.items()):
        y = top + number * ROW
        yield f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end" class="soft">{escape(label)}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{RIGHT - LEFT}" height="{ROW - 6}" rx="2" class="rail"/>'
        for span in timeline.spans:
            if span.lane == lane:
                width = max((span.stop - span.start) * scale - 0.4, 0.6)
                x = LEFT + (span.start - begin) * scale
                yield (
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 6}" fill="{colour_of(span.name)}">'
                    f"<title>{escape(span.name)}, {(span.stop - span.start) * 1e6:.0f} us</title></rect>"
                )


def picture(plain: Timeline, spread: Timeline) -> str:
    scale = (RIGHT - LEFT) / plain.seconds
    devices = [lane for lane in spread.lanes() if "compute" in lane]
    lanes = {}
    for device in devices:
        name = device.split()[0]
        lanes |= {device: name.replace(":", " "), f"{name} copy 0": "copies to it"}
    second = 112
    height = second + 22 + len(lanes) * ROW + 44
    code = [
        f'<text x="26" y="{56 + 19 * number}" class="text mono">{escape(line).replace(" ", NO_BREAK)}</text>'
        for number, line in enumerate(CODE.splitlines())
    ]
    ratio = plain.seconds / spread.seconds
    note = f"{spread.seconds * 1e3:.2g} ms: {ratio:.1f} times as fast, the same result"
    names = {colour_of(name): word for name, word in WORDS.items()}
    legend = [
        f'<rect x="{26 + 0}" y="{height - 92 + 20 * number}" width="12" height="12" rx="2" fill="{colour}"/>'
        f'<text x="46" y="{height - 81 + 20 * number}" class="soft">{word}</text>'
        for number, (colour, word) in enumerate(names.items())
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" width="900" height="{height}" role="img">',
        "<title>One function, eight branches: one after the other on one device, and on four devices at once</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="900" height="{height}" rx="8" class="back"/>',
        f'<rect x="12" y="32" width="290" height="{19 * len(CODE.splitlines()) + 14}" rx="6" class="panel"/>',
        '<text x="14" y="22" class="text title">Your code</text>',
        *code,
        *legend,
        f'<text x="{LEFT}" y="22" class="text title">Plain execution: one operation after the other</text>',
        *rows(plain, {plain.lanes()[0]: "one device"}, 32, scale),
        f'<text x="{LEFT}" y="70" class="soft">{plain.seconds * 1e3:.2g} ms</text>',
        f'<text x="{LEFT}" y="{second - 6}" class="text title">manyhands: traced, scheduled, checked, run</text>',
        *rows(spread, lanes, second + 4, scale),
        f'<text x="{LEFT}" y="{height - 34}" class="text">{note}</text>',
        f'<text x="{LEFT}" y="{height - 14}" class="soft">'
        "operations measured on one CPU core; four such devices, 25 GB/s apart, simulated</text>",
    ]
    return "\n".join([*parts, "</svg>\n"])


def of_the_lab(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page, trials = Path(folder) / "report.html", Path(folder) / "report.json"
        command = [sys.executable, "-m", "manyhands", "lab", "run", "how-linear", "--framework", "torch"]
        subprocess.run([*command, "--html", page, "--json", trials], check=True)
        plot = json.loads(trials.read_text())["results"][0]["finding"]["plots"][1]
    path.write_text(svg(Plot("timeline", plot["title"], spans=[Span(**span) for span in plot["spans"]])))


def of_lanes(path: Path) -> None:
    torch.set_num_threads(1)
    branches = planned(8, 5)
    path.write_text(picture(branches.simulate(), simulate(branches.forecast(devices=4, lanes=1).schedule)))


def of_a_graph(path: Path) -> None:
    graph.save(planned(2, 2).forecast(devices=2, lanes=1).schedule, path)


MAKERS = {"two-devices": of_the_lab, "lanes": of_lanes, "graph": of_a_graph}

if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        MAKERS[name](FOLDER / f"{name}.svg")
