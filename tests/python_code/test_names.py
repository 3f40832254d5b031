"""The names in a function's code: which are globals, and which are attributes."""

from __future__ import annotations

import argparse
import dis
import inspect
import textwrap
import types
from collections.abc import Iterator

import pytest

from manyhands.python_code.names import globals_of, words_of

_OF_GLOBALS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}


def code_of(source: str) -> types.CodeType:
    names: dict[str, types.FunctionType] = {}
    exec(source, names)
    return names["function"].__code__


def test_attributes_are_no_globals() -> None:
    code = code_of("def function(x): return net(x).loss")
    assert globals_of(code) == ["net"]
    assert words_of(code) == ["net", "loss"]


def test_functions_and_classes_inside_count() -> None:
    source = """
    def function(x):
        global last
        class Inner:
            size = width
        last = [scale(part) for part in x]
        return lambda y: shift(y)
    """
    assert set(globals_of(code_of(textwrap.dedent(source)))) >= {"last", "width", "scale", "shift"}


def test_more_names_than_a_byte_can_number() -> None:
    names = [f"name{number}" for number in range(700)]
    code = code_of(f"def function(): return {' + '.join(names)}")
    assert globals_of(code) == names


@pytest.mark.parametrize("module", [argparse, inspect, textwrap])
def test_the_same_as_the_disassembler(module: types.ModuleType) -> None:
    functions = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
    assert functions
    for function in functions:
        assert set(globals_of(function.__code__)) == set(disassembled(function.__code__))


def disassembled(code: types.CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in _OF_GLOBALS)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from disassembled(constant)
