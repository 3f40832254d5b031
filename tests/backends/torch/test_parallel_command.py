"""``manyhands parallel script.py:function``: what the function is called with, and what is refused before it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands import cli as command

SCRIPT = """
import torch

def inputs():
    return torch.ones(3, 3), torch.ones(3, 3)

def product(x, y):
    return x @ y

def alone():
    return torch.ones(3, 3) * 2

def one(x):
    return x

def never(x, y):
    raise AssertionError("it was called")

value = 3
"""


@pytest.fixture
def tell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(function: str, *options: str, script: str = SCRIPT) -> tuple[int, str]:
        Path("script.py").write_text(script)
        code = command.main(["parallel", f"script.py:{function}", *options])
        told = capsys.readouterr()
        return code, told.err if code else told.out

    return run


def test_a_function_without_parameters_is_called_without(tell: Any) -> None:
    code, told = tell("alone")
    assert code == 0
    assert told.startswith("alone: run as")


def test_arguments_by_name(tell: Any) -> None:
    given = "{'scale': 2.0, 'x': torch.ones(3)}"
    script = f"import torch\ndef function(x, *, scale): return x * scale\ndef inputs(): return {given}\n"
    code, told = tell("function", script=script)
    assert code == 0, told
    assert told.startswith("function: run as")


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        ("one", (), "script.py:one: too many positional arguments: write a function inputs() in the script"),
        ("value", (), "there is no function 'value' in script.py"),
        ("nothing", (), "there is no function 'nothing' in script.py"),
        ("never", ("--draw", "graph.png"), "write 'graph.svg'"),
        ("never", ("--timeline", "missing/t.png"), "there is no folder 'missing'"),
        ("never", ("--timeline", "t.txt"), "write 't.svg' or 't.png' or 't.json'"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_run(
    tell: Any, function: str, options: tuple[str, ...], words: str
) -> None:
    code, told = tell(function, *options)
    assert code == 1
    assert words in told
    assert told.startswith("manyhands: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("count", ["0", "-2", "two"])
def test_a_number_of_devices_is_checked_first(tell: Any, capsys: pytest.CaptureFixture[str], count: str) -> None:
    with pytest.raises(SystemExit) as ended:
        tell("never", "--devices", count)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"--devices: {count!r}: give a whole number of at least 1" in told
