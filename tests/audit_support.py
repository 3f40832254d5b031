"""What corpora share: which lines are planted, and what an audit of the folder says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from support import run_program

CORPUS = Path(__file__).parent / "audit" / "corpus"
TRAINERS = Path(__file__).parent / "audit" / "trainers"


def programs(framework: str, kind: str) -> list[str]:
    """The names of the programs of a framework: ``kind`` is planted or clean."""
    return sorted(path.stem for path in (CORPUS / framework / kind).glob("*.py"))


def planted(framework: str, name: str, folder: Path = CORPUS) -> set[tuple[int, str]]:
    """The lines of a program that are marked, with the kind of their defect."""
    lines = (folder / framework / "planted" / f"{name}.py").read_text().splitlines()
    marks = ((number, re.search(r"# planted: (\S+)", line)) for number, line in enumerate(lines, 1))
    return {(number, mark[1]) for number, mark in marks if mark is not None}


def audit(framework: str, folder: Path = CORPUS, **environment: str) -> dict[str, Any]:
    """The findings of all programs of a framework, by name; one process runs them all."""
    done = run_program(CORPUS / "run.py", folder / framework, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def lines_and_kinds(report: dict[str, Any]) -> set[tuple[int, str]]:
    return {(finding["line"], finding["kind"]) for finding in report["findings"]}
