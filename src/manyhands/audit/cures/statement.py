"""The statement of a line, as the syntax tree of its file has it: where a value goes, and who counts the loop."""

from __future__ import annotations

import ast
import functools
import linecache
import os
from collections.abc import Iterator
from enum import IntEnum

from manyhands.audit.cures.later import Later

# Calls that store their arguments unchanged.
_KEEPERS = {"append", "appendleft", "extend", "insert", "update", "setdefault", "put", "put_nowait"}
_KEEPERS |= {"dict", "list", "tuple", "sum"}
_DECIDERS = {"max", "min", "sorted", "any", "all", "range", "bool"}
_KEEPING = (ast.Tuple, ast.List, ast.Dict, ast.Starred, ast.keyword, ast.NamedExpr, ast.Await, ast.Yield)
_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.DictComp)
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
_COUNTERS = ("batch_idx", "step", "iteration")  # arguments of hooks that libraries call in every step
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)


class ValueUse(IntEnum):
    """What a line does with a value that it reads."""

    KEPT = 0  # it is stored, returned or computed with: that can be done on the device
    LATER = 1  # it is stored, and another line may want a number
    NEEDED = 2  # a call or a text wants a number
    DECIDES = 3  # control flow


class _File:
    """A file's tree, with the parent of every node."""

    def __init__(self, source: str) -> None:
        self.root = ast.parse(source)
        self.parents = {child: parent for parent in ast.walk(self.root) for child in ast.iter_child_nodes(parent)}


@functools.lru_cache(maxsize=64)
def _file(source: str) -> _File | None:
    try:
        return _File(source)
    except (SyntaxError, ValueError):
        return None


class Statement:
    """One line of a file, with the syntax tree around it; code that cannot be parsed has no nodes."""

    def __init__(self, source: str, number: int) -> None:
        file = _file(source)
        self.number = number
        self._parents: dict[ast.AST, ast.AST] = file.parents if file is not None else {}
        self._root = file.root if file is not None else None
        lines = source.splitlines()
        self._text = lines[number - 1] if 0 < number <= len(lines) else ""
        self.code = self._text.strip().partition("  #")[0].rstrip()
        self._indent = len(self._text) - len(self._text.lstrip())
        self._is_alone = False  # whether it is all that is known of its program

    @classmethod
    def at(cls, file: str, number: int, code: str) -> Statement:
        """A line of a file; if the file cannot be read, the line alone."""
        statement = cls("".join(linecache.getlines(file)), number)
        is_there = statement.code == code and statement._root is not None
        if not is_there:
            return cls.alone(code)
        statement._is_alone = not os.path.isfile(file)  # a cell of a notebook: others may use its names
        return statement

    @classmethod
    def alone(cls, code: str) -> Statement:
        """A line without its file."""
        statement = cls(code, 1)
        if statement._root is None and code.endswith(":"):
            statement = cls(f"{code} pass", 1)
            statement.code = code
        statement._is_alone = True
        return statement

    # Nodes

    def calls(self, *names: str) -> list[ast.Call]:
        """The calls of functions or methods with these names that end in this line."""
        nodes = ast.walk(self._root) if self._root is not None else ()
        return [
            node
            for node in nodes
            if isinstance(node, ast.Call)
            and node.func.end_lineno == node.end_lineno == self.number
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

    # Text

    def start(self, node: ast.expr) -> int:
        """Where a node begins in the code, in bytes; a node of an earlier line begins with the code."""
        return node.col_offset - self._indent if node.lineno == self.number else 0

    def end(self, node: ast.expr) -> int:
        return (node.end_col_offset or 0) - self._indent

    def text(self, node: ast.expr) -> str:
        return self.code.encode()[self.start(node) : self.end(node)].decode()

    def dot(self, call: ast.Call) -> int:
        """Where ``.name()`` of a method's call begins."""
        function = call.func
        assert isinstance(function, ast.Attribute)
        return self.code.encode().rindex(b".", 0, self.end(function) - len(function.attr.encode()) + 1)

    def edited(self, *edits: tuple[int, int, str]) -> str:
        """The code with parts of it (from, to, in bytes) replaced."""
        code = self.code.encode()
        for start, end, text in sorted(edits, reverse=True):
            code = code[:start] + text.encode() + code[end:]
        return code.decode()

    # Meaning

    def use(self, node: ast.expr) -> ValueUse:
        """What the line does with a value."""
        child: ast.AST = node
        for parent in self.above(node):
            if isinstance(parent, _STATEMENTS):
                if self._decides_later(parent):
                    return ValueUse.DECIDES
                later = Later(self._parents, parent, is_alone=self._is_alone)
                return ValueUse.LATER if later.needs_a_number(node) else ValueUse.KEPT
            use = _use_in(parent, child)
            if use is not ValueUse.KEPT:
                return use
            child = parent
        return ValueUse.NEEDED

    def _decides_later(self, statement: ast.stmt) -> bool:
        """Whether an assigned variable is used in a condition of the same loop or function."""
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        around = next((node for node in self.above(statement) if isinstance(node, (*_LOOPS, *_SCOPES))), None)
        if not names or around is None:
            return False
        tests = [node.test for node in ast.walk(around) if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert))]
        tests += [node for node in ast.walk(around) if isinstance(node, (ast.Compare, ast.BoolOp))]
        used = {name.id for test in tests for name in ast.walk(test) if isinstance(name, ast.Name)}
        return bool(names & used)

    def counter(self) -> str | None:
        """The variable that counts the steps of the loop around this line."""
        for node in self._around():
            if isinstance(node, _LOOPS):
                return _counter_of(node)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return next((a.arg for a in node.args.args if a.arg in _COUNTERS), None)
        return None

    def is_rare(self) -> bool:
        """Whether the line runs only in some steps: below ``if step % 100 == 0``."""
        tests = [node.test for node in self._around() if isinstance(node, ast.If)]
        return any(isinstance(part, ast.Mod) for test in tests for part in ast.walk(test))

    def _around(self) -> Iterator[ast.AST]:
        """Everything that the line's statement is in, innermost first."""
        nodes = ast.walk(self._root) if self._root is not None else ()
        here = next((node for node in nodes if isinstance(node, ast.stmt) and node.lineno == self.number), None)
        return self.above(here) if here is not None else iter(())


def name_of(call: ast.Call) -> str:
    """The name of what is called, without its owner."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _use_in(parent: ast.AST, child: ast.AST) -> ValueUse:
    if isinstance(parent, ast.Call):
        name = name_of(parent)
        return ValueUse.KEPT if name in _KEEPERS else ValueUse.DECIDES if name in _DECIDERS else ValueUse.NEEDED
    if isinstance(parent, ast.IfExp):
        return ValueUse.DECIDES if child is parent.test else ValueUse.KEPT
    if isinstance(parent, (ast.Compare, ast.BoolOp, ast.If, ast.While, ast.Assert, ast.Match)):
        return ValueUse.DECIDES
    if isinstance(parent, ast.UnaryOp):
        return ValueUse.DECIDES if isinstance(parent.op, ast.Not) else ValueUse.KEPT
    if isinstance(parent, ast.BinOp):
        left = parent.left
        is_text = isinstance(left, ast.JoinedStr) or (isinstance(left, ast.Constant) and isinstance(left.value, str))
        return ValueUse.NEEDED if is_text else ValueUse.KEPT
    if isinstance(parent, _COMPREHENSIONS):
        is_made = child is (parent.value if isinstance(parent, ast.DictComp) else parent.elt)
        return ValueUse.KEPT if is_made else ValueUse.NEEDED
    if isinstance(parent, ast.Subscript):
        return ValueUse.KEPT if child is parent.value else ValueUse.NEEDED
    return ValueUse.KEPT if isinstance(parent, _KEEPING) else ValueUse.NEEDED


def _counter_of(loop: ast.For | ast.AsyncFor | ast.While) -> str | None:
    target = None if isinstance(loop, ast.While) else _counting_target(loop)
    if isinstance(target, ast.Name):
        return target.id
    for node in ast.walk(loop):
        is_sum = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name)
        if is_sum and isinstance(node.value, ast.Constant) and node.value.value == 1:  # type: ignore[attr-defined]
            return str(node.target.id)  # type: ignore[attr-defined]
    return None


def _counting_target(loop: ast.For | ast.AsyncFor) -> ast.expr | None:
    """The variable of ``for i in range(n)`` and ``for i, batch in enumerate(data)``, also within ``tqdm(...)``."""
    source, target = loop.iter, loop.target
    while isinstance(source, ast.Call) and name_of(source) not in ("range", "enumerate") and source.args:
        source = source.args[0]
    name = name_of(source) if isinstance(source, ast.Call) else ""
    if name == "enumerate" and isinstance(target, ast.Tuple):
        return target.elts[0]
    return target if name == "range" else None
