"""The code blocks of README.md, of the pages in docs/ and of the READMEs in examples/.

A Python block runs with the framework that it imports (``from manyhands import jax as mh``), or that of the block
before. A block whose fence has ``needs ...`` in its title (a GPU, Lightning, two machines) is compiled, not run:

    ```python title="needs a GPU"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<options>.*)$")
_IMPORT = re.compile(r"^\s*from manyhands import (torch|jax|tensorflow|mxnet)\b", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is the number of its first line of code."""

    page: Path
    line: int
    language: str
    title: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language == "python" and "needs " not in self.title


def blocks(page: Path) -> list[Block]:
    return list(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    for number, text in lines:
        fence = _FENCE.match(text)
        if fence is None:
            continue
        indent = fence["indent"]
        code = []
        for _, inside in lines:
            if inside == f"{indent}```":
                break
            code.append(inside.removeprefix(indent))
        else:
            raise AssertionError(f"{page}:{number}: the block does not end")
        title = re.search(r'title="([^"]*)"', fence["options"])
        yield Block(page, number + 1, fence["language"], title[1] if title else "", "\n".join(code) + "\n")


def by_framework(page: Path) -> dict[str, list[Block]]:
    """The blocks of a page that are run, by the framework that they use."""
    frameworks: dict[str, list[Block]] = {}
    framework = "torch"
    for block in blocks(page):
        if block.is_run:
            imported = _IMPORT.search(block.code)
            framework = imported[1] if imported else framework
            frameworks.setdefault(framework, []).append(block)
    return frameworks
