"""The statement of a line, as the syntax tree of its file has it: its calls, its text, and what becomes of a value.

A line may keep a value on its device where it is one statement that computes with the value and stores it: in a name
or an attribute, or by ``append``. What the rest of the program does with it is not looked at.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from enum import Enum, auto

_DECIDERS = {"max", "min", "sorted", "any", "all", "range", "bool"}
_STORING = {"append", "appendleft"}
_COUNTERS = ("batch_idx", "step", "iteration")  # arguments of hooks that libraries call in every step


class ValueUse(Enum):
    """What becomes of a value that a line reads."""

    KEPT = auto()  # it is stored, and a tensor can be stored as well
    NEEDED = auto()  # something may want a number
    DECIDES = auto()  # control flow


@functools.lru_cache(maxsize=64)
def _parse(source: str) -> tuple[ast.Module, dict[ast.AST, ast.AST]] | None:
    """The tree of a file, and the parent of every node."""
    try:
        root = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    return root, {child: parent for parent in ast.walk(root) for child in ast.iter_child_nodes(parent)}


class Statement:
    """One line of a file, with the syntax tree around it; code that cannot be parsed has no nodes."""

    def __init__(self, code: str, file: str = "", number: int = 0) -> None:
        """A line of a file; if the file does not have it, the line alone."""
        self.code = code
        lines = linecache.getlines(file) if file else []
        text = lines[number - 1] if 0 < number <= len(lines) else ""
        parsed = _parse("".join(lines)) if text.strip().partition("  #")[0].rstrip() == code else None
        if parsed is None:
            number, text = 1, code
            parsed = _parse(f"{code} pass" if code.endswith(":") else code) or (ast.Module([], []), {})
        self._root, self._parents = parsed
        self._number, self._indent = number, len(text) - len(text.lstrip())

    # Nodes

    def calls(self, *names: str) -> list[ast.Call]:
        """The calls of functions or methods with these names that end in this line."""
        return [
            node
            for node in ast.walk(self._root)
            if isinstance(node, ast.Call)
            and node.func.end_lineno == node.end_lineno == self._number
            and name_of(node) in names
        ]

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Everything that a node is in, innermost first."""
        parent = self._parents.get(node)
        while parent is not None:
            yield parent
            parent = self._parents.get(parent)

    def whole(self) -> ast.stmt | None:
        """The statement, if the line consists of exactly one."""
        try:
            body = ast.parse(self.code).body
        except SyntaxError:
            return None
        return body[0] if len(body) == 1 else None

    def call(self) -> ast.Call | None:
        """The call that the whole statement is, if it is one."""
        whole = self.whole()
        return whole.value if isinstance(whole, ast.Expr) and isinstance(whole.value, ast.Call) else None

    # Text: positions are bytes of the code

    def start(self, node: ast.expr) -> int:
        """Where a node begins; a node of an earlier line begins with the code."""
        return node.col_offset - self._indent if node.lineno == self._number else 0

    def end(self, node: ast.expr) -> int:
        return (node.end_col_offset or 0) - self._indent

    def dot(self, method: ast.Attribute) -> int:
        """Where ``.name`` of a method begins."""
        return self.code.encode().rindex(b".", 0, self.end(method) - len(method.attr.encode()) + 1)

    def text(self, node: ast.expr) -> str:
        return self.code.encode()[self.start(node) : self.end(node)].decode()

    def with_edits(self, *edits: tuple[int, int, str]) -> str:
        """The code with parts of it (from, to) replaced."""
        code = self.code.encode()
        for start, end, text in sorted(edits, reverse=True):
            code = code[:start] + text.encode() + code[end:]
        return code.decode()

    # Meaning

    def use(self, value: ast.expr) -> ValueUse:
        """What becomes of a value of this line."""
        child: ast.AST = value
        for parent in self.above(value):
            match parent:
                case ast.If() | ast.While() | ast.Assert() | ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                    return ValueUse.DECIDES
                case ast.IfExp() if child is parent.test:
                    return ValueUse.DECIDES
                case ast.Call() if name_of(parent) in _DECIDERS:
                    return ValueUse.DECIDES
                case ast.stmt():
                    return ValueUse.KEPT if self.stored_in() else ValueUse.NEEDED
                case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()) | ast.UnaryOp() | ast.List():
                    pass
                case ast.Tuple() | ast.ListComp():
                    pass
                case ast.Call() if name_of(parent) in _STORING and child is not parent.func:
                    pass
                case _:
                    return ValueUse.NEEDED
            child = parent
        return ValueUse.NEEDED

    def stored_in(self) -> str | None:
        """Where the line stores a value, if it is one statement that does so."""
        match self.whole():
            case (
                ast.Assign(targets=[ast.Name() | ast.Attribute() as target])
                | ast.AnnAssign(target=ast.Name() | ast.Attribute() as target)
                | ast.AugAssign(target=ast.Name() | ast.Attribute() as target)
                | ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr="append" | "appendleft")))
            ):
                return ast.unparse(target)
        return None

    def counter(self) -> str | None:
        """The variable that counts the steps of the loop around this line."""
        for node in self._around():
            if isinstance(node, (ast.For, ast.AsyncFor)):
                target = _counting_target(node)
                return target.id if isinstance(target, ast.Name) else None
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return next((a.arg for a in node.args.args if a.arg in _COUNTERS), None)
        return None

    def is_rare(self) -> bool:
        """Whether the line runs only in some steps: below ``if step % 100 == 0``."""
        tests = (node.test for node in self._around() if isinstance(node, ast.If))
        return any(isinstance(part, ast.Mod) for test in tests for part in ast.walk(test))

    def _around(self) -> Iterator[ast.AST]:
        """Everything that the line's statement is in, innermost first."""
        nodes = ast.walk(self._root)
        here = next((node for node in nodes if isinstance(node, ast.stmt) and node.lineno == self._number), None)
        return self.above(here) if here is not None else iter(())


def name_of(call: ast.Call) -> str:
    """The name of what is called, without its owner."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _counting_target(loop: ast.For | ast.AsyncFor) -> ast.expr | None:
    """The variable of ``for i in range(n)`` and ``for i, batch in enumerate(data)``, also within ``tqdm(...)``."""
    source, target = loop.iter, loop.target
    while isinstance(source, ast.Call) and name_of(source) not in ("range", "enumerate") and source.args:
        source = source.args[0]
    name = name_of(source) if isinstance(source, ast.Call) else ""
    if name == "enumerate" and isinstance(target, ast.Tuple):
        return target.elts[0]
    return target if name == "range" else None
