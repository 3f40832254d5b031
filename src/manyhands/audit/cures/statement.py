"""The statement of a line, as the syntax tree of its file has it: its calls, its text, and what becomes of a value.

A line may keep a value on its device only where everything that becomes of it is known to work with a tensor. A name
is followed through its scope, wherever in it a use is written (in a loop the line before is later, too). Few uses are
known to work: arithmetic, ``append``, ``len``, ``sum``, and one read after the loop (``float``, ``.item()``,
``print``, an f-string). Any other needs a number, and so does a value that leaves the scope: by ``return``, in an
attribute, by a function that reads the name.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
from collections.abc import Iterator
from enum import Enum, auto

_DECIDERS = {"max", "min", "sorted", "any", "all", "range", "bool"}
_STORING = {"append", "appendleft"}
_COUNTERS = ("batch_idx", "step", "iteration")  # arguments of hooks that libraries call in every step
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Module)


class ValueUse(Enum):
    """What becomes of a value that a line reads."""

    KEPT = auto()  # everything works with a tensor, too
    NEEDED = auto()  # something wants a number, or it is not known
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
        is_known = parsed is not None and os.path.isfile(file)  # else a cell of a notebook: others may use its names
        if parsed is None:
            number, text = 1, code
            parsed = _parse(f"{code} pass" if code.endswith(":") else code) or (ast.Module([], []), {})
        self._root, self._parents = parsed
        self._number, self._indent = number, len(text) - len(text.lstrip())
        self._is_known = is_known

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

    def edited(self, *edits: tuple[int, int, str]) -> str:
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
                case ast.Call() if name_of(parent) not in _STORING:
                    return ValueUse.DECIDES if name_of(parent) in _DECIDERS else ValueUse.NEEDED
                case ast.JoinedStr():
                    return ValueUse.NEEDED
                case ast.stmt():
                    break
            child = parent
        works = _Uses(self, value, is_known=self._is_known).work(value)
        return ValueUse.KEPT if works else ValueUse.NEEDED

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
        return any(map(_is_every_nth, self._around()))

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


def _is_every_nth(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(isinstance(part, ast.Mod) for part in ast.walk(node.test))


def _counting_target(loop: ast.For | ast.AsyncFor) -> ast.expr | None:
    """The variable of ``for i in range(n)`` and ``for i, batch in enumerate(data)``, also within ``tqdm(...)``."""
    source, target = loop.iter, loop.target
    while isinstance(source, ast.Call) and name_of(source) not in ("range", "enumerate") and source.args:
        source = source.args[0]
    name = name_of(source) if isinstance(source, ast.Call) else ""
    if name == "enumerate" and isinstance(target, ast.Tuple):
        return target.elts[0]
    return target if name == "range" else None


class _Uses:
    """What becomes of one value of a statement, as far as its file shows."""

    def __init__(self, line: Statement, value: ast.expr, *, is_known: bool) -> None:
        """``is_known``: the file has the whole program; else names may be used elsewhere."""
        self._line = line
        above = list(line.above(value))
        self._statement = next((node for node in above if isinstance(node, ast.stmt)), None)
        self._scope = next((node for node in above if isinstance(node, _SCOPES)), None) if is_known else None
        self._loop = next((node for node in above if isinstance(node, (*_LOOPS, *_SCOPES))), None)
        self._followed: set[str] = set()

    def work(self, node: ast.AST, *, in_list: bool = False) -> bool:
        """Whether all that becomes of a value works with a tensor (``in_list``: with a list of tensors)."""
        parent = self._line.parent(node)
        if in_list:
            match parent:
                case ast.Subscript(slice=ast.Constant() | ast.UnaryOp(), ctx=ast.Load()):
                    return self.work(parent)
                case ast.Call(func=ast.Name(id="len" | "sum" as function), args=[_], keywords=[]):
                    return function == "len" or self.work(parent)
        else:
            match parent:
                case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()) | ast.UnaryOp(op=ast.USub()):
                    return self.work(parent)
                case ast.List() | ast.Tuple() | ast.ListComp():
                    return self.work(parent, in_list=True)
                case ast.FormattedValue(conversion=-1) | ast.Attribute(attr="item"):
                    return self._is_late(parent)
                case ast.Call(func=ast.Name(id="float" | "int" | "print")):
                    return self._is_late(parent)
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method), args=[_], keywords=[]):
                    is_statement = isinstance(self._line.parent(parent), ast.Expr)
                    return (
                        method in _STORING
                        and is_statement
                        and not self._grow(node)
                        and self._follow(name, in_list=True)
                    )
        match parent:
            case ast.Expr():
                return True
            case ast.Assign(targets=[ast.Name() as target]) | ast.AnnAssign(target=ast.Name() as target):
                return not self._grow(target, node) and self._follow(target.id, in_list=in_list)
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
                return self._follow(name, in_list=in_list)
        return False

    def _is_late(self, read: ast.AST) -> bool:
        """Whether a read is after the loop, or in some of its steps only."""
        for node in self._line.above(read):
            if node is self._loop:
                return isinstance(node, ast.Module)
            if _is_every_nth(node):
                return True
        return True

    def _grow(self, *names: ast.AST) -> bool:
        """Whether one of these names is changed by ``+=``: a tensor then changes for everyone who holds it."""
        wanted = {name.id for name in names if isinstance(name, ast.Name)}
        nodes = ast.walk(self._scope) if self._scope is not None else ()
        grown = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
        return any(isinstance(target, ast.Name) and target.id in wanted for target in grown)

    def _follow(self, name: str, *, in_list: bool) -> bool:
        """Whether all uses of a name work."""
        if name in self._followed:
            return True
        self._followed.add(name)
        uses = self._own_uses(name)
        starts = [use for use in uses if isinstance(use.ctx, ast.Store) and not self._is_grown(use)]
        return bool(starts) and all(self._use_works(use, in_list) for use in uses)

    def _own_uses(self, name: str) -> list[ast.Name]:
        """The uses of a name of this scope; none if another scope may use it as well."""
        if self._scope is None or isinstance(self._scope, ast.ClassDef):
            return []
        uses = []
        for node in ast.walk(self._scope):
            is_declared = isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names
            if is_declared or (isinstance(node, ast.arg) and node.arg == name):
                return []
            if isinstance(node, ast.Name) and node.id == name:
                if next(outer for outer in self._line.above(node) if isinstance(outer, _SCOPES)) is not self._scope:
                    return []
                uses.append(node)
        return uses

    def _is_grown(self, use: ast.Name) -> bool:
        return isinstance(self._line.parent(use), ast.AugAssign)

    def _use_works(self, use: ast.Name, in_list: bool) -> bool:
        parent = self._line.parent(use)
        if isinstance(use.ctx, ast.Store):
            return self._is_grown(use) or self._starts_well(use, parent, in_list)
        if isinstance(use.ctx, ast.Del):
            return True
        if in_list and isinstance(parent, ast.Attribute):  # hist.append(...), as a statement
            call = self._line.parent(parent)
            is_statement = isinstance(call, ast.Call) and isinstance(self._line.parent(call), ast.Expr)
            return is_statement and parent.attr in (*_STORING, "clear")
        return self.work(use, in_list=in_list)

    def _starts_well(self, target: ast.Name, parent: ast.AST | None, in_list: bool) -> bool:
        """Whether a name begins with a number, or with a list of its own; nothing else can be added to."""
        if parent is self._statement:
            return True
        match parent, self._line.parent(parent) if parent is not None else None:
            case ast.Tuple(elts=targets), ast.Assign(value=ast.Tuple(elts=values)):  # correct, total = 0, 0
                value: ast.expr | None = values[targets.index(target)]
            case ast.Assign(targets=[_]) | ast.AnnAssign(), _:
                value = parent.value
            case _:  # one list with two names
                return False
        match value:
            case ast.List() | ast.ListComp() | ast.Call(func=ast.Name(id="list")):
                return in_list
            case ast.Constant(value=int() | float() | None):
                return not in_list
            case ast.BinOp():  # mean = total / n
                parts = [part.id for part in ast.walk(value) if isinstance(part, ast.Name)]
                return not in_list and not self._followed.isdisjoint(parts)
        return False
