"""What a function takes from outside its arguments, watched: closures, globals, modules, optimizers.

A trace holds for the tensors, numbers and flags that the function found there. Before tracing all of that is written
down as facts: this closure's ``net`` is that module, it is in training mode, its ``weight`` is that tensor at that
address, the optimizer's ``lr`` is 0.1. Three uses: after tracing, a fact that no longer holds shows that the function
changes Python state, and it is put back; before every call, all facts together are the guard of the plan (one generated
expression, tens of nanoseconds a fact); and what changes at every call is named to the user.

Not seen: attributes of imported modules, settings of PyTorch's own layers other than those in ``_SETTINGS``, elements
of lists longer than ``_LONG``, and what is reached only through C code.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_SETTINGS = ("p", "momentum", "eps", "inplace", "track_running_stats")
_LONG = 1000
_NOTHING = object()


@dataclass(frozen=True)
class _Fact:
    """Where to look, what was there, and how to say it."""

    name: str
    kind: str  # item, cell, length, address, gradient
    holder: Any
    key: Any = None
    value: Any = None
    optimizer: bool = False


class Outside:
    """The facts about what a function and its arguments reach."""

    def __init__(self, function: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        self._facts: list[_Fact] = []
        self._seen: dict[int, Any] = {}
        self._whole: list[tuple[Any, Any]] = []  # lists and dicts with a copy, to put them back
        self._optimizer = False
        self._visit(function, getattr(function, "__name__", "function"))
        for number, one in enumerate(arguments):
            self._visit(one, f"argument {number}")
        self._check: Callable[[], bool] | None = None

    # Looking

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if self._check is None:
            self._check = _compiled(self._facts)
        return self._check()

    def changed(self) -> _Fact | None:
        """The first fact that no longer holds."""
        return next((fact for fact in self._facts if not _compiled([fact])()), None)

    def put_back(self) -> None:
        """Undo what was changed in Python; the numbers in tensors are not touched."""
        for holder, before in self._whole:
            if isinstance(holder, list):
                holder[:] = before
            else:
                for key in [key for key in holder if key not in before]:
                    del holder[key]
                holder.update(before)
        for fact in self._facts:
            if fact.kind == "item" and isinstance(fact.holder, dict):
                if fact.holder.get(fact.key, _NOTHING) is not fact.value:
                    fact.holder[fact.key] = fact.value
            elif fact.kind == "cell":
                fact.holder.cell_contents = fact.value

    def add_address(self, tensor: torch.Tensor, name: str) -> None:
        """Its memory must stay where it is."""
        self._seen.setdefault(id(tensor), tensor)
        if tensor.layout == torch.strided and not _is_odd(tensor):
            self._add(_Fact(name, "address", tensor, value=tensor.data_ptr()))

    def add_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor | None, *, same: bool) -> None:
        """Its gradient must be None, or there, or the same tensor as it was."""
        kept = gradient if same or gradient is None else ...
        self._add(_Fact("a gradient", "gradient", tensor, value=kept))

    # Walking

    def _add(self, fact: _Fact) -> None:
        self._facts.append(fact)
        self._check = None

    def optimizer(self, one: torch.optim.Optimizer) -> None:
        """Its settings and its state; what is missing in the state is made at its first step."""
        self._visit(one, type(one).__name__)

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, (*_PLAIN, type, types.ModuleType)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.add_address(value, name)
        elif isinstance(value, nn.Module):
            self._module(value, name)
        elif isinstance(value, torch.optim.Optimizer):
            self._of_optimizer(value, name)
        elif isinstance(value, (list, tuple)):
            self._sequence(value, name)
        elif isinstance(value, dict):
            self._dict(value, name, whole=True)
        elif isinstance(value, types.FunctionType):
            self._function(value, name)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, name.rpartition(".")[0] or "self")
            self._visit(value.__func__, name)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, name)
        elif not _is_foreign(type(value)) and hasattr(value, "__dict__"):
            self._dict(vars(value), name)
            self._visit(vars(type(value)).get("__call__"), f"{name}.__call__")

    def _function(self, function: types.FunctionType, name: str) -> None:
        if _is_foreign(function):
            return
        for word, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            self._add(_Fact(word, "cell", cell, value=content, optimizer=self._optimizer))
            self._visit(content, word)
        for word in _names(function.__code__):
            content = function.__globals__.get(word, _NOTHING)
            if content is _NOTHING or isinstance(content, (types.ModuleType, type)):
                continue
            self._add(_Fact(word, "item", function.__globals__, word, content))
            self._visit(content, word)
        self._visit(function.__defaults__, f"a default of {name}")
        self._visit(function.__kwdefaults__, f"a default of {name}")

    def _module(self, module: nn.Module, name: str) -> None:
        own = vars(module)
        self._add(_Fact(f"{name}.training", "item", own, "training", module.training))
        for part in ("_parameters", "_buffers", "_modules"):
            self._dict(own[part], name, whole=True)
        if own["_forward_hooks"] or own["_forward_pre_hooks"]:
            self._visit(own["_forward_hooks"], f"{name}'s hooks")
            self._visit(own["_forward_pre_hooks"], f"{name}'s hooks")
        foreign = _is_foreign(type(module))
        for word, value in own.items():
            if word in _SETTINGS if foreign else word != "training" and not word.startswith("_"):
                self._add(_Fact(f"{name}.{word}", "item", own, word, value))
                self._visit(value, f"{name}.{word}")
        if not foreign:
            self._visit(type(module).forward, f"{name}.forward")

    def _of_optimizer(self, one: torch.optim.Optimizer, name: str) -> None:
        self._optimizer = True
        self._sequence(one.param_groups, f"{name}.param_groups")
        self._dict(one.state, f"{name}.state", whole=True)
        self._optimizer = False

    def _sequence(self, value: Any, name: str) -> None:
        self._add(_Fact(f"the length of {name}", "length", value, value=len(value), optimizer=self._optimizer))
        if isinstance(value, list) and len(value) <= _LONG:
            self._whole.append((value, list(value)))
        for number, one in enumerate(value if len(value) <= _LONG else ()):
            if isinstance(value, list):
                self._add(_Fact(f"{name}[{number}]", "item", value, number, one, self._optimizer))
            self._visit(one, f"{name}[{number}]")

    def _dict(self, value: Any, name: str, *, whole: bool = False) -> None:
        if whole:
            self._add(_Fact(f"the length of {name}", "length", value, value=len(value), optimizer=self._optimizer))
            self._whole.append((value, dict(value)))
        for key, one in list(value.items())[:_LONG]:
            label = f"{name}.{key}" if isinstance(key, str) else name
            self._add(_Fact(label, "item", value, key, one, self._optimizer))
            self._visit(one, label)


# Facts as code


def _compiled(facts: Iterable[_Fact]) -> Callable[[], bool]:
    names: dict[str, Any] = {}
    given: dict[int, str] = {}

    def name(value: Any) -> str:
        if id(value) not in given:
            given[id(value)] = f"k{len(names)}"
            names[given[id(value)]] = value
        return given[id(value)]

    tests = [_test(fact, name) for fact in facts]
    body = "\n".join(f"        if not ({test}): return False" for test in tests)
    tail = "        return True\n    except (LookupError, ValueError, RuntimeError):\n        return False"
    source = f"def holds():\n    try:\n{body}\n{tail}"
    names["same"] = _same
    exec(compile(source, "<manyhands guard>", "exec"), names)
    return names["holds"]  # type: ignore[no-any-return]


def _test(fact: _Fact, name: Callable[[Any], str]) -> str:
    holder = name(fact.holder)
    if fact.kind == "length":
        return f"len({holder}) == {fact.value}"
    if fact.kind == "address":
        return f"{holder}.data_ptr() == {fact.value}"
    if fact.kind == "gradient":
        if fact.value is ...:
            return f"{holder}.grad is not None"
        return f"{holder}.grad is {name(fact.value)}"
    now = f"{holder}.cell_contents" if fact.kind == "cell" else f"{holder}[{name(fact.key)}]"
    if isinstance(fact.value, _PLAIN) and fact.value is not None and not isinstance(fact.value, bool):
        known = name(fact.value)
        return f"{now} is {known} or same({now}, {known})"
    return f"{now} is {name(fact.value)}"


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other and str(one) == str(other))


def _names(code: types.CodeType) -> list[str]:
    """All words that a function's code, and the functions inside it, may look up among its globals."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(_names(constant))
    return list(found)


def _is_foreign(value: Any) -> bool:
    """Code that is not the user's: it is not looked into."""
    module = str(getattr(value, "__module__", "") or "")
    if module.startswith(("manyhands.engine", "manyhands.backends")):
        return True
    return module.partition(".")[0] in ("torch", "numpy", "builtins", "functools", "collections", "optree")


def _is_odd(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, nn.Parameter) and not isinstance(tensor, nn.Parameter)
