"""Rewrite the lines of a program that were found, so that they ask the second pass what to do.

``total += loss.item()`` becomes ``total += __manyhands_audit__.call((0, True), "item", loss)``: the line is number 0 of
the list, and this is its first call. Everything else stays as it is, line numbers included. A line whose cure is
another line of code (``x[0] = 1.0``) is replaced as a whole, in the cured run only.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from manyhands.audit.prove.plan import Way

NAME = "__manyhands_audit__"
_READS = {"item", "tolist", "asscalar", "asnumpy", "numpy", "cpu", "asarray", "array", "device_get"}
_READ_FUNCTIONS = {"float", "int", "complex", "asarray", "array", "device_get"}
WAITS = {"synchronize", "waitall", "wait_to_read", "block_until_ready"}
_COPIES = {"to", "cuda", "copy_"}


@dataclass(frozen=True)
class Change:
    """A line that is rewritten: in these ways, and for :attr:`.plan.Way.REWRITTEN` to this source."""

    file: str
    line: int
    ways: tuple[Way, ...]
    cure: str = ""


def rewritten(source: bytes | str, file: str, changes: Sequence[Change], *, cured: bool) -> CodeType:
    """The code of a module with the changes that concern its file."""
    tree = ast.parse(source, file)
    for number, change in enumerate(changes):
        if change.file != os.path.abspath(file):
            continue
        if Way.REWRITTEN in change.ways:
            tree = _Statement(change).visit(tree) if cured else tree
        else:
            tree = _Calls(number, change).visit(tree)
    return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)


def install(changes: Sequence[Change], *, cured: bool) -> None:
    """Rewrite modules when they are imported, instead of taking their compiled code."""
    files = {change.file for change in changes}
    loader: Any = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self: Any, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        if os.path.abspath(path) in files:
            return rewritten(self.get_data(path), path, changes, cured=cured)
        return original(self, fullname)  # type: ignore[no-any-return]

    loader.get_code = get_code


class _Calls(ast.NodeTransformer):
    """Replaces the calls of one line that read, wait or copy, and the texts and prints that they are part of."""

    def __init__(self, number: int, change: Change) -> None:
        self._number, self._line = number, change.line
        self._is_first = True
        self._methods: set[str] = set()
        self._functions: set[str] = set()
        for way in change.ways:
            if way is Way.LATE:
                self._methods |= _READS | {"to"}
                self._functions |= _READ_FUNCTIONS | {"print", "str", "repr", "format"}
            elif way is Way.REMOVED:
                self._methods |= WAITS
                self._functions |= WAITS
            elif way is Way.COPY:
                self._methods |= _COPIES
        self._texts = Way.LATE in change.ways

    def _is_here(self, node: ast.expr) -> bool:
        return node.lineno <= self._line <= (node.end_lineno or node.lineno)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not self._is_here(node):
            return node
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in self._methods:
            return self._asks(node, "call", ast.Constant(function.attr), function.value, *node.args)
        if isinstance(function, ast.Name) and function.id in self._functions:
            return self._asks(node, "function", function, *node.args)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        if not self._texts or not self._is_here(node):
            return node
        parts: list[ast.expr] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                form = part.format_spec if part.format_spec is not None else ast.Constant("")
                items = [self.visit(part.value), ast.Constant(part.conversion), form]
                parts.append(ast.Tuple(items, ast.Load()))
            else:
                parts.append(part)
        call = ast.Call(ast.Name("text", ast.Load()), [], [])
        return self._asks(ast.copy_location(call, node), "text", *parts)

    def _asks(self, node: ast.Call, method: str, *args: ast.expr) -> ast.Call:
        function = ast.Attribute(ast.Name(NAME, ast.Load()), method, ast.Load())
        place = ast.Constant((self._number, self._is_first))  # type: ignore[arg-type]
        self._is_first = False
        return ast.copy_location(ast.Call(function, [place, *args], node.keywords), node)


class _Statement(ast.NodeTransformer):
    """Replaces the statement of one line."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def visit(self, node: ast.AST) -> Any:
        is_simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
        if is_simple and node.lineno == node.end_lineno == self._change.line:  # type: ignore[attr-defined]
            (cure,) = ast.parse(self._change.cure).body
            for part in ast.walk(cure):
                ast.copy_location(part, node)
            return cure
        return self.generic_visit(node)
