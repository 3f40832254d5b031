"""The examples of the README run as they stand, each with the framework whose door it uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import run_python

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def _door(example: str) -> str:
    found = re.search(r"^from manyhands import (\w+) as mh", example, flags=re.MULTILINE)
    assert found is not None, "an example says whose door it uses"
    return found[1]


@pytest.mark.once
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda code: code.splitlines()[0])
def test_the_example_runs(example: str, framework: str) -> None:
    if _door(example) != framework:
        pytest.skip(f"an example of {_door(example)}")
    result = run_python(example, MANYHANDS_VIRTUAL_DEVICES="")
    assert result.returncode == 0, result.stderr


def test_every_framework_has_an_example(framework: str) -> None:
    assert framework in map(_door, EXAMPLES)
