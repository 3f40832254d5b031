"""The examples of the README run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import run_python

README = (Path(__file__).parents[3] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda code: code.splitlines()[0])
def test_the_example_runs(example: str) -> None:
    result = run_python(example, MANYHANDS_VIRTUAL_DEVICES="")
    assert result.returncode == 0, result.stderr


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2
