"""Watches the state that a function reads outside its arguments: closures, globals, modules, optimizers.

A trace is valid for the tensors, numbers and flags that the function found there. Before tracing, all of that is
recorded as facts: this closure's ``net`` is that module, it is in training mode, its ``weight`` is that tensor at that
address, the optimizer's ``lr`` is 0.1. Three uses: after tracing, a fact that no longer holds shows that the function
changes Python state, which is put back; before every call, all facts together are the guard of the plan
(:class:`.facts.Facts`); and messages name what changes at every call.

Code of an installed package that cannot be guarded counts only if it runs (:mod:`.executed`). Not watched: attributes
of installed modules; the inside of attributes of PyTorch's own layers that are no settings, and of elements of lists
and dicts longer than ``_LONG`` (that they are the same objects is watched); what is reached only through C code.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from manyhands.backends.torch import compat
from manyhands.backends.torch.guards.containers import put_back, put_back_item
from manyhands.backends.torch.guards.executed import Executed
from manyhands.backends.torch.guards.facts import NOTHING, PLAIN, Fact, Facts, first_false, in_context, members_in
from manyhands.backends.torch.guards.kinds import content_of, is_odd, is_opaque
from manyhands.backends.torch.guards.namespaces import Namespaces, is_cache
from manyhands.errors import CannotTrace, NotYet
from manyhands.python_code.names import (
    function_behind,
    globals_of,
    is_foreign,
    making,
    members,
    modules_named,
    slots_of,
    why_unwatched,
    words_of,
)

_RECREATED = "_recreate_cm"  # in contextlib.ContextDecorator
# A function with these names may read any variable of the environment.
_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
_READ_ALL = {"globals", "eval", "exec"}  # functions of Python that may read any variable
_SETTINGS = (*PLAIN, tuple, types.FunctionType, types.BuiltinFunctionType)  # of PyTorch's layers: stride, activation
_OF_MODULES = frozenset(vars(nn.Module()))
# Dicts of a module that may be replaced.
_CONTENT = {compat.PARAMETERS, compat.BUFFERS, compat.MODULES, *compat.HOOKS_OF_MODULES}
_OF_ALL = compat.HOOKS_OF_EVERY_MODULE
_CALLED = ("forward", "backward", "setup_context", "jvp", "vmap", "__call__")  # by PyTorch
_WITH_STATE = ("torch.optim.", "torch.distributions.", "torch.amp.")  # objects of PyTorch that users keep and change
_ONCE = {"item", "attribute"}  # facts that are reached by many ways: a global variable, a logger
_LONG = 1000


class Outside:
    """The facts about what a function and its arguments reach."""

    def __init__(self, function: Callable[..., Any], arguments: Iterable[Any] = ()) -> None:
        self._facts: list[Fact] = []
        self._placed: set[tuple[str, int, Any]] = set()
        self._seen: dict[int, Any] = {}
        self._whole: list[tuple[Any, Any]] = []  # lists and dicts with their copies, to put them back
        self._optimizer = self._in_module = False
        self._recorded = torch.is_grad_enabled()  # otherwise requires_grad does not matter
        self._addresses: set[int] = set()
        self._formed: set[int] = set()  # the ids of tensors whose form others guard
        self.spaces = Namespaces()
        self._words = set(_CALLED)  # and names in the code seen so far
        self._looked: set[tuple[int, str]] = set()  # names that were looked up, by module
        # The code of installed packages; and of some of it, why a function that runs it is refused.
        self._installed: set[types.CodeType] = set()
        self._cached: set[types.CodeType] = set()  # below a cache: it runs again once the cache is cleared
        self._below_cache = False
        self._refusals: dict[types.CodeType, CannotTrace] = {}
        self._generators: dict[int, tuple[random.Random, Any]] = {}  # of that code, with their states
        self._owners: set[type] = set()  # classes whose members are guarded
        self._classes: dict[type, None] = {}  # classes that were seen, and those of objects that were seen
        self._visit(function, getattr(function, "__name__", "function"))
        for number, argument in enumerate(arguments):
            self._visit(argument, f"argument {number}")
        for owner, word, content in members(self._classes, self._words, is_opaque):
            self._add(Fact(f"{owner.__name__}.{word}", "item", vars(owner), word, content))
            self._visit(function_behind(content), f"{owner.__name__}.{word}")
        if any(isinstance(value, nn.Module) for value in self._seen.values()):
            self._add(Fact("hooks of all modules", "hooks", _OF_ALL, value=sum(map(len, _OF_ALL))))
        self._check: Facts | None = None

    # Looking

    def holds(self) -> bool:
        """Whether all facts hold."""
        if self._check is None:
            self._check = Facts(
                fact for fact in self._facts if fact.kind != "form" or id(fact.holder) not in self._formed
            )
        return self._check.hold()

    def forms_are_guarded(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the form of these tensors to other guards, which are checked as well."""
        self._formed.update(map(id, tensors))
        self._check = None

    @property
    def seen(self) -> Mapping[int, object]:
        """All objects that facts are about, by their ids."""
        return self._seen

    def changed(self) -> Fact | None:
        """The first fact that no longer holds."""
        return first_false(self._facts)

    def forget_stand_ins(self) -> None:
        """Remove what a function has stored for the class of stand-ins, if that is what it stores for tensors.

        Libraries look up how to handle a class of tensors, and remember it.
        """
        for holder, before in self._whole:
            if isinstance(holder, dict) and compat.FakeTensor not in before:
                stored = dict.get(holder, compat.FakeTensor)
                if stored is not None and stored is before.get(torch.Tensor) and not isinstance(stored, PLAIN):
                    del holder[compat.FakeTensor]

    def doubtful(self) -> Collection[types.CodeType]:
        """The code of installed packages, if it matters which of it runs."""
        return self._installed if self._refusals else ()

    def only_executed(self, executed: Executed) -> None:
        """Raise if code ran that cannot be guarded; drop the facts about functions that did not run."""
        for code, error in self._refusals.items():
            if executed.ran(code):
                raise error
        if self._refusals:
            idle = {code for code in self._installed - self._cached if not executed.ran(code)}
            self._facts = [fact for fact in self._facts if _code_of(fact) not in idle]
            self._check = None

    def put_generators_back(self) -> None:
        """Undo the draws of random numbers while tracing."""
        for generator, state in self._generators.values():
            if generator.getstate() != state:
                generator.setstate(state)

    def put_back(self) -> None:
        """Undo what was changed in Python; the numbers in tensors are not touched."""
        for holder, before in self._whole:
            put_back(holder, before)
        for fact in self._facts:
            if fact.kind == "item" and isinstance(fact.holder, dict):
                if fact.value is not NOTHING and dict.get(fact.holder, fact.key, NOTHING) is not fact.value:
                    put_back_item(fact.holder, fact.key, fact.value)
            elif fact.kind == "cell":
                fact.holder.cell_contents = fact.value
            elif fact.kind == "attribute" and getattr(fact.holder, fact.key, NOTHING) is not fact.value:
                object.__setattr__(fact.holder, fact.key, fact.value)  # also where the class is frozen

    def add_address(self, tensor: torch.Tensor, name: str) -> None:
        """Guard the address of a tensor, its form, and whether it requires a gradient.

        Of a parameter or buffer only the number of elements is guarded, which is quick; of others the whole form.
        """
        self._seen.setdefault(id(tensor), tensor)
        if id(tensor) in self._addresses:
            return
        self._addresses.add(id(tensor))
        if is_lazy(tensor):
            raise NotYet(f"{name} gets its shape in the first call: the next call is planned")
        if tensor.layout == torch.strided and not is_odd(tensor):
            form = tensor.numel() if self._in_module else (tensor.shape, tensor.stride())
            wanted = tensor.requires_grad if self._recorded else None
            self._add(Fact(f"the form of {name}", "form", tensor, wanted, form))
            self._add(Fact(name, "address", tensor, value=tensor.data_ptr()))

    def add_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor | None, *, same: bool) -> None:
        """Guard a gradient: it must stay None, or exist, or be the same tensor."""
        expected = gradient if same or gradient is None else ...
        self._add(
            Fact(
                "a gradient; zero_grad(set_to_none=False) keeps it", "gradient", tensor, tensor.requires_grad, expected
            )
        )

    # Walking

    def _add(self, fact: Fact) -> None:
        if fact.kind in _ONCE:
            place = (fact.kind, id(fact.holder), fact.key)
            if place in self._placed:
                return
            self._placed.add(place)
        self._facts.append(fact)
        self._check = None

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Visit an optimizer: its settings, and its state as far as its first step has created it."""
        self._visit(optimizer, type(optimizer).__name__)

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, (*PLAIN, type, types.ModuleType)) or id(value) in self._seen:
            return
        if isinstance(value, logging.Logger):
            self._logger(value, name)
            return
        if isinstance(value, logging.Handler):  # it is asked only by a call that logs
            return
        if isinstance(value, contextvars.ContextVar):
            self._context_variable(value, name)
            return
        if (reason := _why_unguardable(value, name)) is not None:
            raise CannotTrace(reason)
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.add_address(value, name)
            self._dict(vars(value), name)
            self.spaces.space(vars(value), name)
        elif is_cache(value):
            self.spaces.cache(value, name)
            before, self._below_cache = self._below_cache, True
            self._visit(value.__wrapped__, name)
            self._below_cache = before
        elif isinstance(value, nn.Module):
            self._module(value, name)
        elif isinstance(value, torch.optim.Optimizer):
            self._of_optimizer(value, name)
        elif isinstance(value, (list, tuple, deque)):
            self._sequence(value, name)
        elif (look := content_of(value)) is not None:
            self._add(Fact(f"the content of {name}", "content", value, look, look(value)))
            self._whole.append((value, value.copy()))
        elif isinstance(value, dict):
            self._dict(value, name, whole=True)
            if not is_opaque(type(value)):  # with methods of its own
                self._object(value, name)
        elif isinstance(value, types.MappingProxyType):
            self._add(Fact(f"the length of {name}", "length", value, value=len(value)))
            self._dict(value, name)
        elif isinstance(value, types.FunctionType):
            self._function(value, name)
        elif isinstance(value, types.MethodType):
            holder = value.__self__
            self._visit(holder, name.rpartition(".")[0] or (name if why_unwatched(holder) else "self"))
            self._visit(value.__func__, name)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, name)
        elif not is_opaque(type(value)):
            self._object(value, name)
        elif str(type(value).__module__).startswith(_WITH_STATE):
            self._dict(vars(value), name, whole=True)
        elif (inner := getattr(value, "__wrapped__", None)) is not None:  # a function that parallel has wrapped
            self._visit(inner, name)

    def _logger(self, value: logging.Logger, name: str) -> None:
        """Guard whether a logger is silent: a call that does log is noticed when it is traced."""
        self._seen[id(value)] = value
        self._add(Fact(f"{name}.manager.disable", "attribute", value.manager, "disable", value.manager.disable))
        logger: logging.Logger | None = value
        while logger is not None:
            self._add(Fact(f"the level of {name}", "attribute", logger, "level", logger.level))
            self._add(Fact(f"{name}.disabled", "attribute", logger, "disabled", logger.disabled))
            logger = logger.parent

    def _context_variable(self, value: contextvars.ContextVar[Any], name: str) -> None:
        content = in_context(value)
        self._seen[id(value)] = value
        self._add(Fact(name, "context", value, value=content))
        self._visit(content, f"{name}.get()")

    def _object(self, value: Any, name: str) -> None:
        if hasattr(value, "__dict__"):
            self._dict(vars(value), name, whole=True)
        cls: type = type(value)
        for word in slots_of(cls):
            if (content := getattr(value, word, NOTHING)) is NOTHING:
                self.spaces.empty(value, word, f"{name}.{word}")
            else:
                self._add(Fact(f"{name}.{word}", "attribute", value, word, content))
                self._visit(content, f"{name}.{word}")
        self._class(cls)

    def _class(self, cls: type) -> None:
        """Remember a user's class: what the code names of it becomes facts once all code is known."""
        self._classes[cls] = None
        for owner in cls.__mro__:
            if is_opaque(owner):
                continue
            self.spaces.space(owner, owner.__name__)
            if owner not in self._owners:  # a method that it inherits may be overridden later
                self._owners.add(owner)
                namespace = vars(owner)
                self._add(
                    Fact(f"the attributes of {owner.__name__}", "members", namespace, value=members_in(namespace))
                )
            for word, content in list(vars(owner).items()):
                if isinstance(content, type) and word in self._words and content not in self._classes:
                    self._class(content)

    def _function(self, function: types.FunctionType, name: str) -> None:
        if is_opaque(function):  # it may wrap a user's function: torch.no_grad()(net)
            self._visit(vars(function).get("__wrapped__"), name)
            return
        if is_foreign(function):
            self._installed.add(function.__code__)
            if self._below_cache:
                self._cached.add(function.__code__)
        names, looked_up = words_of(function.__code__), globals_of(function.__code__)
        readers = _READ_ALL & {*(names if "builtins" in names else looked_up)}
        for reader in sorted(readers - function.__globals__.keys()):
            self._refuse(
                function,
                f"{name} uses {reader}, which can read anything and so cannot be guarded: read the value outside, and "
                "pass it as an argument",
            )
        if {"sys", "modules"} <= {*names}:  # sys.modules[__name__].scale reads the global scale
            looked_up = names
        if not _ENVIRONMENT.isdisjoint(names):
            self._visit(os.environ, "os.environ")
        self._words.update(names)
        self.spaces.space(function.__globals__, "")
        for word, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not bound yet
                self.spaces.empty(cell, "cell_contents", word)
                continue
            self._add(Fact(word, "cell", cell, value=content, optimizer=self._optimizer))
            if _RECREATED in names and word == "self":  # a context manager as a decorator makes a new one for each call
                for part in ("func", "args", "kwds"):
                    self._visit(getattr(content, part, None), f"{name}.{part}")
            elif not self._refused(function, content, word):
                self._named(content, word, names)
        for word in looked_up:
            if not self._refused(function, function.__globals__.get(word), word):
                self._item(function.__globals__, word, word, names)
        for word, module in modules_named(set(names) - set(looked_up), function.__globals__.get("__package__")):
            self._named(module, word, names)
        for word in ("__code__", "__defaults__"):  # autoreload replaces them
            self._add(Fact(f"{name}.{word}", "attribute", function, word, getattr(function, word)))
        self._visit(function.__defaults__, f"a default of {name}")
        self._visit(function.__kwdefaults__, f"a default of {name}")
        self._dict(vars(function), name, whole=True)

    def _refuse(self, function: types.FunctionType, reason: str) -> None:
        """Refuse what a function does: at once, or, of an installed package, once it is known to have run."""
        error = CannotTrace(reason)
        if function.__code__ not in self._installed:
            raise error
        self._refusals.setdefault(function.__code__, error)

    def _refused(self, function: types.FunctionType, content: Any, name: str) -> bool:
        """Whether a name in a function's code stands for a source of random numbers, whose state can be put back."""
        reason = _why_unguardable(content, name)
        if reason is None or not isinstance(content, random.Random):
            return False
        self._refuse(function, reason)
        self._generators[id(content)] = (content, content.getstate())
        return True

    def _item(self, holder: dict[str, Any], word: str, name: str, names: Sequence[str]) -> None:
        """A global variable; also a user's class, which may be redefined, and a name that may be defined later."""
        content = holder.get(word, NOTHING)
        fixed = isinstance(content, types.ModuleType) or (isinstance(content, type) and is_opaque(content))
        if not fixed:
            self._add(Fact(name, "item", holder, word, content))
        self._named(content, name, names)

    def _named(self, content: Any, name: str, names: Sequence[str]) -> None:
        """The value of a name in a function's code; of a class or module, what other names in the code take from it."""
        if isinstance(content, type):
            self._class(content)
            for owner, word, method in making(content, is_opaque):
                self._add(Fact(f"{owner.__name__}.{word}", "item", vars(owner), word, method))
                self._visit(function_behind(method), f"{owner.__name__}.{word}")
        elif not isinstance(content, types.ModuleType):
            self._visit(content, name)
        elif not is_foreign(content):
            self.spaces.space(vars(content), name)
            for word in vars(content).keys() & set(names):
                if (id(content), word) not in self._looked:
                    self._looked.add((id(content), word))
                    self._item(vars(content), word, f"{name}.{word}", names)

    def _module(self, module: nn.Module, name: str) -> None:
        if isinstance(module, nn.TransformerEncoder) and not module.training and module.use_nested_tensor:
            error = CannotTrace(
                f"{name}, in eval mode, skips the padding that a mask marks, so shapes depend on values: "
                "nn.TransformerEncoder(..., enable_nested_tensor=False) can be planned"
            )
            error.holds = lambda: not module.training
            raise error
        attributes = vars(module)
        foreign = is_opaque(type(module))
        self._add(Fact(f"{name}.training", "item", attributes, "training", module.training))
        before, self._in_module = self._in_module, True
        for part in (compat.PARAMETERS, compat.BUFFERS):
            self._dict(attributes[part], name, whole=True)
        self._in_module = before
        self._dict(attributes[compat.MODULES], name, whole=True)
        hooks = [attributes[word] for word in compat.HOOKS_OF_MODULES]
        self._add(Fact(f"the hooks of {name}", "hooks", hooks, value=sum(map(len, hooks))))
        for registered in filter(None, hooks):
            self._visit(registered, f"the hooks of {name}")
        self._add(Fact(f"the number of {name}'s attributes", "length", attributes, value=len(attributes)))
        self.spaces.space(attributes, name)
        if not foreign:
            self._class(type(module))
        for word, value in attributes.items():
            if word == "training" or (word in _OF_MODULES and word not in _CONTENT):
                continue
            self._add(Fact(f"{name}.{word}", "item", attributes, word, value))
            if word not in _OF_MODULES and (not foreign or isinstance(value, _SETTINGS)):
                self._visit(value, f"{name}.{word}")

    def _of_optimizer(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        self._optimizer = True
        for word in ("param_groups", "state"):  # load_state_dict() replaces them
            self._add(Fact(f"{name}.{word}", "item", vars(optimizer), word, vars(optimizer)[word], optimizer=True))
        self._sequence(optimizer.param_groups, f"{name}.param_groups")
        self._dict(optimizer.state, f"{name}.state", whole=True)
        self._optimizer = False

    def _sequence(self, value: Any, name: str) -> None:
        if not isinstance(value, tuple):
            self._add(Fact(f"the length of {name}", "length", value, value=len(value), optimizer=self._optimizer))
            self._whole.append((value, list(value)))
            if len(value) > _LONG:
                self._add(Fact(f"the content of {name}", "whole", value, value=value.copy()))
        for number, item in enumerate(value if len(value) <= _LONG else ()):
            if not isinstance(value, tuple):
                self._add(Fact(f"{name}[{number}]", "item", value, number, item, self._optimizer))
            self._visit(item, f"{name}[{number}]")

    def _dict(self, value: Any, name: str, *, whole: bool = False) -> None:
        if whole:
            self._add(Fact(f"the length of {name}", "length", value, value=len(value), optimizer=self._optimizer))
            stored = dict(dict.items(value))
            self._whole.append((value, stored))
            if len(value) > _LONG:
                self._add(Fact(f"the content of {name}", "whole", value, value=stored))
            elif isinstance(value, OrderedDict) and len(value) > 1:  # move_to_end() gives it no new version
                self._add(Fact(f"the order of {name}", "content", value, list, list(value)))
        # As they are stored: a subclass may make a new value each time it is asked.
        items = dict.items(value) if isinstance(value, dict) else value.items()
        for key, item in list(items)[:_LONG]:
            label = f"{name}.{key}" if isinstance(key, str) else name
            self._add(Fact(label, "item", value, key, item, self._optimizer))
            self._visit(item, label)


def _code_of(fact: Fact) -> types.CodeType | None:
    """The code that a fact is about: a function's settings, or a method of a class."""
    behind = fact.holder if fact.kind == "attribute" else None
    if fact.kind == "item" and isinstance(fact.holder, types.MappingProxyType):
        behind = function_behind(fact.value)
    return behind.__code__ if isinstance(behind, types.FunctionType) else None


def _why_unguardable(value: Any, name: str) -> str | None:
    if isinstance(value, (contextvars.ContextVar, types.MappingProxyType)):  # what they hold can be looked at
        return None
    kind = why_unwatched(value)
    return None if kind is None else f"it uses {name}, {kind}, whose values cannot be guarded"
