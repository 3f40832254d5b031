"""Whether a program goes on to work if a value that it stores stays on its device: every later use has to be known.

A name is followed through its scope, wherever in it a use is written (in a loop the line before is later, too). Few
uses are known to work: arithmetic, ``append``, ``len``, ``sum``, and one read after the loop (``float``, ``.item()``,
``print``, an f-string). Any other needs a number, and so does a value that leaves the scope: by ``return``, in an
attribute, by a function that reads the name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Module)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_HOLDERS = (ast.List, ast.Tuple, ast.ListComp)
_NUMBERS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_READERS = {"float", "int", "print"}
_STORING = {"append", "appendleft"}
_Parents = Mapping[ast.AST, ast.AST]


class Later:
    """The uses of what one statement stores."""

    def __init__(self, parents: _Parents, statement: ast.stmt, *, is_alone: bool) -> None:
        """``is_alone``: the rest of the program is not known."""
        self._parents, self._statement = parents, statement
        above = list(self._above(statement))
        self._scope = None if is_alone else next((node for node in above if isinstance(node, _SCOPES)), None)
        self._loop = next((node for node in above if isinstance(node, (*_LOOPS, *_SCOPES))), None)
        self._followed: set[str] = set()

    def needs_a_number(self, value: ast.expr) -> bool:
        """Whether something needs the number itself that this part of the statement is."""
        return not self._is_fine(value, in_list=False)

    def _is_fine(self, node: ast.AST, *, in_list: bool) -> bool:
        """Whether everything that becomes of a value works with a tensor (``in_list``: with a list of tensors)."""
        parent = self._parents.get(node)
        if isinstance(parent, ast.Expr):
            return True
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, _NUMBERS):
            return not in_list and self._is_fine(parent, in_list=False)
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.USub):
            return not in_list and self._is_fine(parent, in_list=False)
        if isinstance(parent, _HOLDERS) and not in_list:
            return self._is_fine(parent, in_list=True)
        if isinstance(parent, ast.Subscript) and in_list and isinstance(parent.ctx, ast.Load):
            return isinstance(parent.slice, (ast.Constant, ast.UnaryOp)) and self._is_fine(parent, in_list=False)
        if isinstance(parent, (ast.FormattedValue, ast.Attribute)):
            is_read = parent.conversion == -1 if isinstance(parent, ast.FormattedValue) else parent.attr == "item"
            return is_read and not in_list and self._is_read_late(parent)
        if isinstance(parent, ast.Call) and node is not parent.func:
            return self._is_fine_in_call(parent, in_list)
        return self._is_fine_stored(parent, node, in_list)

    def _is_fine_in_call(self, call: ast.Call, in_list: bool) -> bool:
        function, is_only = call.func, len(call.args) == 1 and not call.keywords
        if isinstance(function, ast.Name):
            if in_list:
                return is_only and (
                    function.id == "len" or (function.id == "sum" and self._is_fine(call, in_list=False))
                )
            return function.id in _READERS and self._is_read_late(call)
        stores = isinstance(function, ast.Attribute) and function.attr in _STORING and is_only and not in_list
        if not stores or not isinstance(self._parents.get(call), ast.Expr) or self._grows(call.args[0]):
            return False
        owner = function.value if isinstance(function, ast.Attribute) else function
        return isinstance(owner, ast.Name) and self._follow(owner.id, in_list=True)

    def _is_fine_stored(self, statement: ast.AST | None, value: ast.AST, in_list: bool) -> bool:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
            target = statement.target
        else:
            return False
        if isinstance(statement, ast.AugAssign) and not isinstance(statement.op, _NUMBERS):
            return False
        if not isinstance(target, ast.Name) or (
            not isinstance(statement, ast.AugAssign) and self._grows(target, value)
        ):
            return False
        return self._follow(target.id, in_list=in_list)

    def _grows(self, *names: ast.AST) -> bool:
        """Whether one of these names is changed by ``+=``: a tensor then changes for everyone who holds it."""
        wanted = {name.id for name in names if isinstance(name, ast.Name)}
        grown = [node.target for node in self._nodes() if isinstance(node, ast.AugAssign)]
        return any(isinstance(target, ast.Name) and target.id in wanted for target in grown)

    def _is_read_late(self, read: ast.AST) -> bool:
        """Whether a read is after the loop, or in some of its steps only."""
        for node in self._above(read):
            if node is self._loop:
                return not isinstance(node, _LOOPS)
            if isinstance(node, ast.If) and any(isinstance(part, ast.Mod) for part in ast.walk(node.test)):
                return True
        return True

    def _follow(self, name: str, *, in_list: bool) -> bool:
        if name in self._followed:
            return True
        self._followed.add(name)
        if self._scope is None or not self._is_own(name):
            return False
        uses = [node for node in self._nodes() if isinstance(node, ast.Name) and node.id == name]
        begins = [use for use in uses if isinstance(use.ctx, ast.Store) and not self._is_grown(use)]
        return bool(begins) and all(self._is_fine_use(use, in_list) for use in uses)

    def _is_grown(self, use: ast.Name) -> bool:
        return isinstance(self._parents.get(use), ast.AugAssign)

    def _is_own(self, name: str) -> bool:
        """Whether a name is of this scope alone: no argument, not declared as another's, read by no inner function."""
        scope = self._scope
        arguments = ast.walk(scope.args) if isinstance(scope, _FUNCTIONS) else ()
        if isinstance(scope, ast.ClassDef) or any(isinstance(a, ast.arg) and a.arg == name for a in arguments):
            return False
        inner = [node for node in self._nodes() if isinstance(node, (*_FUNCTIONS, ast.ClassDef))]
        readers = [part for function in inner for part in ast.walk(function)]
        declared = [node for node in [*self._nodes(), *readers] if isinstance(node, (ast.Global, ast.Nonlocal))]
        if any(name in node.names for node in declared):
            return False
        return not any(_reads(function, name) for function in inner)

    def _is_fine_use(self, use: ast.Name, in_list: bool) -> bool:
        parent = self._parents.get(use)
        if isinstance(use.ctx, ast.Store):
            return self._is_grown(use) or self._is_fine_start(use, parent, in_list)
        if isinstance(use.ctx, ast.Del):
            return True
        if isinstance(parent, ast.Attribute) and in_list:  # hist.append(...), as a statement
            call = self._parents.get(parent)
            is_statement = isinstance(call, ast.Call) and isinstance(self._parents.get(call), ast.Expr)
            return is_statement and parent.attr in (*_STORING, "clear")
        return self._is_fine(use, in_list=in_list)

    def _is_fine_start(self, target: ast.Name, parent: ast.AST | None, in_list: bool) -> bool:
        """Whether a name begins with a number, or with a list of its own; nothing else can be added to."""
        if parent is self._statement or (isinstance(parent, ast.AnnAssign) and parent.value is None):
            return True
        value = parent.value if isinstance(parent, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(parent, ast.Tuple):  # correct, total = 0, 0
            whole = self._parents.get(parent)
            values = whole.value if isinstance(whole, ast.Assign) else None
            value = values.elts[parent.elts.index(target)] if isinstance(values, ast.Tuple) else None
        if in_list and isinstance(parent, ast.Assign) and len(parent.targets) > 1:  # one list with two names
            return False
        if in_list:
            return isinstance(value, _HOLDERS) or (isinstance(value, ast.Call) and ast.unparse(value.func) == "list")
        if isinstance(value, ast.BinOp):  # mean = total / n
            return any(isinstance(part, ast.Name) and part.id in self._followed for part in ast.walk(value))
        return isinstance(value, ast.Constant) and not isinstance(value.value, str)

    def _nodes(self) -> Iterator[ast.AST]:
        """Everything in the scope, but not in the scopes inside of it."""
        left = list(ast.iter_child_nodes(self._scope)) if self._scope is not None else []
        while left:
            node = left.pop()
            yield node
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                left += ast.iter_child_nodes(node)

    def _above(self, node: ast.AST) -> Iterator[ast.AST]:
        parent = self._parents.get(node)
        while parent is not None:
            yield parent
            parent = self._parents.get(parent)


def _reads(function: ast.AST, name: str) -> bool:
    """Whether an inner function or class uses a name that is not its own."""
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    own = [node for node in ast.walk(function) if isinstance(node, ast.arg) and node.arg == name]
    return bool(uses) and not own and not any(isinstance(use.ctx, ast.Store) for use in uses)
