"""The page: it says what the table says, needs nothing from elsewhere, and a real browser shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import title_after

from manyhands.audit import speeds, watch
from manyhands.audit.cure import Stall
from manyhands.audit.kinds import Kind
from manyhands.audit.recorder import Recorder
from manyhands.audit.reports import html, report
from manyhands.audit.sites import Line, Site


@pytest.fixture
def page(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text("import torch\n\nfor x in loader:\n    total += loss.item() if a < b & c else 0\n    step()\n")
    recorder = Recorder(speeds=speeds.h200())
    recorder.frameworks.add("torch")
    for _ in range(8):
        for _ in range(10):
            recorder.launch(1e-5)
        site = Site(Line(str(script), 4), Line("/x/site-packages/lib.py", 7))
        recorder.after(watch.WaitEvent(Stall(Kind.READ, "Tensor.item", site), 0.0, 0.0))
        recorder.step("optimizer")
    path = tmp_path / "report.html"
    path.write_text(html.page(report.make(recorder, program="train.py", warmup=2)))
    return path


def test_a_page_is_whole_and_escaped(page: Path) -> None:
    text = page.read_text()
    assert "predicted for an NVIDIA H200" in text
    assert "a &lt; b &amp; c" in text
    assert "<mark>   4 " in text
    assert "var(--wait)" in text
    assert "in lib.py:7" in text
    assert not re.search(r"(src|href)=|@import|url\(", text)  # nothing from elsewhere


@pytest.mark.parametrize(("width", "head"), [(1200, "table-header-group"), (500, "none")])
def test_a_browser_shows_it_also_on_a_phone(page: Path, width: int, head: str) -> None:
    script = (
        "document.title = [document.documentElement.scrollWidth <= innerWidth, innerWidth,"
        "document.querySelectorAll('rect').length > 10, document.querySelector('mark').offsetHeight > 0,"
        "getComputedStyle(document.querySelector('thead')).display].join(' ')"
    )
    assert title_after(page, script, width=width)[0] == f"true {width} true true {head}"
