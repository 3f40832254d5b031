"""Drawings of the site that need no framework: ``python docs/pictures/charts.py [NAME ...]``.

``loader.svg`` and ``nets.svg`` show figures of docs/how/measurements.md, ``forecasts.svg`` those that
``benchmarks/forecast.py`` computes; ``batch.svg``, ``layers.svg`` and ``which.svg`` explain. All follow the reader's
light or dark mode. Those on the first pages also have a form for phones, ``nets-phone.svg``, where their letters would
be too small.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
STYLE = """
  text { font: 14px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f; }
  .soft { fill: #59636e; } .bold { font-weight: 600; } .middle { text-anchor: middle; } .end { text-anchor: end; }
  .box { fill: #eef1fb; stroke: #4051b5; } .bar { fill: #4051b5; } .less { fill: #b35900; }
  .line { stroke: #59636e; fill: none; } .grid { stroke: #d0d7de; fill: none; }
  .one { fill: #4051b5; } .two { fill: #b35900; } .three { fill: #1a7f37; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .soft { fill: #9198a1; } .line { stroke: #9198a1; } .grid { stroke: #3d444d; }
    .box { fill: #1f2540; stroke: #8c9eff; } .bar, .one { fill: #8c9eff; } .less, .two { fill: #f0a45d; }
    .three { fill: #56d364; }
  }
"""
# Milliseconds a step of Trainer.fit, and of the better of the loop's CUDA graph by hand and `reduce-overhead`.
NETS = {
    "RegNet-Y-400MF": (3.04, 5.21),
    "8 MLPs side by side": (0.50, 0.79),
    "ResNet-50": (2.98, 4.72),
    "MobileNetV3-small": (1.99, 3.11),
    "GoogLeNet": (3.06, 4.58),
    "EfficientNet-B0": (4.15, 6.08),
    "DenseNet-121": (6.72, 9.79),
    "8 experts": (0.37, 0.52),
    "U-Net": (1.24, 1.61),
    "gpt, 8 blocks": (1.75, 2.16),
    "GroupNorm and SiLU": (2.86, 3.35),
    "LSTM, cell by cell": (1.12, 1.21),
    "recommender": (1.90, 2.05),
    "VGG-11 with BatchNorm": (3.20, 3.18),
    "LSTM of PyTorch": (1.58, 1.56),
    "VGG-16": (4.28, 3.76),
    "ViT-B/16": (7.27, 5.97),
    "ConvNeXt-tiny": (6.10, 4.91),
    "Swin-T": (12.3, 6.88),
}
# Milliseconds a step from a DataLoader: manyhands, and its rivals.
LOADER = {
    "ResNet-18": (3.011, {"compiled graph": 3.585, "CUDA graph": 5.171, "Accelerate": 10.06, "Lightning": 10.344}),
    "ResNet-50": (19.157, {"compiled graph": 21.221, "CUDA graph": 29.744, "Accelerate": 30.974, "Lightning": 30.696}),
    "GPT-2": (12.625, {"CUDA graph": 13.137}),
    "U-Net": (1.856, {"compiled graph": 1.582, "CUDA graph": 1.772, "Accelerate": 8.32, "Lightning": 9.143}),
}
FLOORS = (
    ("cli", "the command: one module per subcommand"),
    ("torch · jax · tensorflow · mxnet", "the modules that users import"),
    ("lab · forecast · audit", "experiments; N devices; hidden waits and copies"),
    ("book", "the textbook's names, models and data"),
    ("training", "trainer, loop, callbacks, checkpoints; a folder per framework"),
    ("parallel · tasks", "parallel(fn); with parallel(): explicit tasks"),
    ("placement", "the verbs: to, copy, split, gather, devices, measure"),
    ("backends", "devices, capture and runs; a folder per framework"),
    ("schedule", "graph, lanes, check, simulate, pictures: no framework"),
    ("errors · device · tree · shares", "words"),
)
QUESTIONS = (
    ("What devices are there, how fast?", "manyhands devices --measure"),
    ("A tensor is in the wrong place", "mh.to, mh.check_same_device"),
    ("Train a model on all of them", "mh.Trainer"),
    ("My own loop: independent work at once", "mh.parallel, torch.compile"),
    ("My program is slow", "manyhands audit"),
    ("Will more devices pay? Will it fit?", "manyhands forecast"),
    ("Show me, on this machine", "manyhands lab"),
    ("Test multi-GPU code without a GPU", "manyhands simulate"),
)


def text(x: float, y: float, words: str, *classes: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{" ".join(classes)}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>'


def line(x: float, y: float, to_x: float, to_y: float, kind: str = "line", *, arrow: bool = False) -> str:
    end = ' marker-end="url(#arrow)"' if arrow else ""
    return f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" class="{kind}"{end}/>'


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    arrow = '<marker id="arrow" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    arrow += '<path d="M1 1 L7 4 L1 7" class="line"/></marker>'
    return "\n".join([head, f"<title>{escape(title)}</title><style>{STYLE}</style>{arrow}", *parts, "</svg>\n"])


def loader(left: int = 200, scale: int = 90) -> str:
    """How many times as long as manyhands each rival takes for a step from a loader."""
    row, top, gap = 22, 54, 14
    bottom = top + sum(row * len(rivals) + gap for _, rivals in LOADER.values())

    def parts() -> Iterator[str]:
        yield text(14, 24, "From a DataLoader: times as long as manyhands", "bold")
        for tick in range(6):
            x = left + tick * scale
            yield line(x, top - 8, x, bottom - gap, "line" if tick == 1 else "grid")
            yield text(x, top - 12, f"{tick}", "soft", "middle")
        y = top
        for net, (ours, rivals) in LOADER.items():
            yield text(14, y + 14, net, "bold")
            for rival, taken in rivals.items():
                ratio = taken / ours
                yield text(left - 8, y + 14, rival, "end")
                yield rect(left, y + 2, ratio * scale, row - 5, "bar" if ratio >= 1 else "less")
                yield text(left + ratio * scale + 6, y + 14, f"{ratio:.2f}", "soft")
                y += row
            y += gap
        yield text(14, bottom + 14, "Orange: the rival wins.", "soft")

    return svg(left + 5 * scale + 60, bottom + 26, "Steps from a DataLoader: rivals beside manyhands", parts())


def loader_phone() -> str:
    return loader(190, 26)


def nets(left: int = 190, scale: int = 240) -> str:
    """How many times as fast as its best rival each net trains."""
    ratios = {name: rival / ours for name, (ours, rival) in NETS.items()}
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    top, row = 54, 22
    bottom = top + row * len(ratios)

    def parts() -> Iterator[str]:
        yield text(14, 24, "Trainer.fit beside its best rival, times as fast", "bold")
        for tick in (0, 0.5, 1, 1.5):
            x = left + tick * scale
            yield line(x, top - 8, x, bottom, "line" if tick == 1 else "grid")
            yield text(x, top - 12, f"{tick:g}", "soft", "middle")
        for number, (name, ratio) in enumerate(sorted(ratios.items(), key=lambda item: -item[1])):
            y = top + number * row
            yield text(left - 10, y + 14, name, "end")
            yield rect(left, y + 2, ratio * scale, row - 5, "bar" if ratio >= 1 else "less")
            yield text(left + ratio * scale + 6, y + 14, f"{ratio:.2f}", "soft")
        yield text(14, bottom + 24, f"Geometric mean {mean:.2f}. Orange: the rival wins.", "soft")

    width = round(left + scale * max(ratios.values())) + 59
    return svg(width, bottom + 36, "Nineteen nets through Trainer.fit, each beside its best rival", parts())


def nets_phone() -> str:
    return nets(170, 90)


def forecasts() -> str:
    """The efficiency of N devices as published, and as forecast."""
    sys.path.insert(0, str(FOLDER.parents[1] / "benchmarks"))
    import forecast

    left, bottom, size = 60, 440, 390
    low, high = 0.65, 1.05

    def place(published: float, predicted: float) -> tuple[float, float]:
        each = ((value - low) / (high - low) * size for value in (published, predicted))
        x, y = each
        return left + x, bottom - y

    def parts() -> Iterator[str]:
        yield text(14, 24, "Efficiency of N devices: forecast beside published", "bold")
        for percent in range(70, 101, 10):
            x, y = place(percent / 100, percent / 100)
            yield line(x, bottom, x, bottom - size, "grid") + line(left, y, left + size, y, "grid")
            yield text(x, bottom + 18, f"{percent}%", "soft", "middle") + text(
                left - 6, y + 5, f"{percent}%", "soft", "end"
            )
        yield line(*place(low, low), *place(high, high))
        groups = {"one": "tables", "two": "more tables", "three": "last tables"}
        for number, (kind, name) in enumerate(groups.items()):
            for case in forecast.cases(forecast.GROUPS[name]):
                if case.within_a_node and case.table.timed:
                    ideal = case.table.one / (case.devices if case.table.strong else 1)
                    x, y = place(ideal / case.published, ideal / case.predicted)
                    what = f"{case.table.model}, {case.devices} devices: {case.error:+.1%}"
                    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill-opacity="0.7" class="{kind}">'
                    yield f"{circle}<title>{escape(what)}</title></circle>"
            y = 70 + 24 * number
            yield f'<circle cx="480" cy="{y}" r="5" class="{kind}"/>' + text(494, y + 5, name)
        yield text(left + size / 2, bottom + 40, "as published", "soft", "middle")
        yield text(480, 160, "upwards: as forecast", "soft")

    return svg(660, bottom + 52, "Forecast and published efficiency of several devices within a node", parts())


def batch() -> str:
    """The global batch, its shards, and the one sum of gradients."""

    def parts() -> Iterator[str]:
        yield rect(10, 70, 130, 60, "box") + text(75, 97, "global batch", "middle", "bold")
        yield text(75, 117, "512 samples", "soft", "middle")
        for number, (samples, y) in enumerate(((256, 20), (256, 120))):
            yield line(140, 100, 206, y + 30, arrow=True)
            yield rect(210, y, 190, 60, "box") + text(305, y + 26, f"gpu:{number}, a replica", "middle", "bold")
            yield text(305, y + 46, f"shard of {samples}: gradients", "soft", "middle")
            yield line(400, y + 30, 466, 100, arrow=True)
        yield rect(470, 70, 180, 60, "box") + text(560, 97, "one sum / 512", "middle", "bold")
        yield text(560, 117, "the update of one device", "soft", "middle")

    return svg(660, 200, "A global batch, its shards on two devices, and the sum of their gradients", parts())


def batch_phone() -> str:
    """The same from top to bottom."""

    def parts() -> Iterator[str]:
        yield rect(100, 8, 160, 54, "box") + text(180, 30, "global batch", "middle", "bold")
        yield text(180, 50, "512 samples", "soft", "middle")
        for number, x in enumerate((4, 184)):
            yield line(180, 62, x + 86, 94, arrow=True)
            yield rect(x, 96, 172, 54, "box") + text(x + 86, 118, f"gpu:{number}, a replica", "middle", "bold")
            yield text(x + 86, 138, "shard of 256: gradients", "soft", "middle")
            yield line(x + 86, 150, 180, 182, arrow=True)
        yield rect(80, 184, 200, 54, "box") + text(180, 206, "one sum / 512", "middle", "bold")
        yield text(180, 226, "the update of one device", "soft", "middle")

    return svg(360, 246, "A global batch, its shards on two devices, and the sum of their gradients", parts())


def boxes(rows: Iterable[tuple[str, str]], title: str, *, arrows: bool) -> str:
    """Pairs side by side, one row each."""
    rows = list(rows)

    def parts() -> Iterator[str]:
        for number, (first, second) in enumerate(rows):
            y = 8 + 40 * number
            yield rect(8, y, 270, 32, "box") + text(143, y + 21, first, "middle", "bold" if not arrows else "")
            if arrows:
                yield line(278, y + 16, 306, y + 16, arrow=True)
            yield text(312, y + 21, second, "bold" if arrows else "soft")

    return svg(720, 16 + 40 * len(rows), title, parts())


def layers() -> str:
    return boxes(FLOORS, "The floors of the code: each imports only what stands below it", arrows=False)


def which() -> str:
    return boxes(QUESTIONS, "Which tool do I need?", arrows=True)


def which_phone() -> str:
    """Each tool below its question."""

    def parts() -> Iterator[str]:
        for number, (question, tool) in enumerate(QUESTIONS):
            y = 4 + 66 * number
            yield rect(4, y, 352, 30, "box") + text(16, y + 20, question)
            yield line(22, y + 30, 22, y + 44, arrow=True) + text(32, y + 50, tool, "bold")

    return svg(360, 66 * len(QUESTIONS), "Which tool do I need?", parts())


CHARTS = (loader, loader_phone, nets, nets_phone, forecasts, batch, batch_phone, layers, which, which_phone)
MAKERS = {make.__name__.replace("_", "-"): make for make in CHARTS}

if __name__ == "__main__":
    for name in sys.argv[1:] or MAKERS:
        (FOLDER / f"{name}.svg").write_text(MAKERS[name]())
