"""Finds the Python state in a step that a CUDA graph would freeze.

A graph repeats the kernels of the captured step, and Python does not run again: a counter keeps its value, a random
choice repeats, a list is appended to once. So the trainer compares the model's Python state after each warm-up step: a
graph would freeze whatever changes. Changes in the first step are ignored, because many models fill a cache in it.

The comparison covers the attributes of every module (numbers, strings, tensors, generators of random numbers, and such
in short lists and dicts), the optimizer's options per parameter group, plain numbers that are logged, random numbers of
Python, NumPy and PyTorch's CPU generator (the GPU's generator works in a graph), and hooks. A tensor is its memory: it
may change in place, but another one in its place is not seen by a graph. For example, a model with ``self.calls += 1``
in its forward pass, after each of three steps::

    {"Net.calls": 1}, {"Net.calls": 2}, {"Net.calls": 3}      -> "Net.calls changes from step to step"

It does not cover globals, closures and attributes of objects that are not modules: set ``optimize="off"`` with those.

A plain value of a batch (its number, the name of a file in it) may change from replay to replay only if no code looks
at it. While steps warm up they get an :class:`Unread` instead::

    value = unread(7, reads.append)
    names = [value]             nothing
    value % 2, f"{value}"       reads: ["train.py:31", "train.py:31"]
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

import manyhands
from manyhands import tree
from manyhands.backends.torch import compat
from manyhands.training.torch.optimizers import Several
from manyhands.training.torch.state.module_state import OF_EVERY_MODULE
from manyhands.training.torch.step.running_sums import RunningSums

_PLAIN = (bool, int, float, str, type(None))
_MOST_KINDS = 32  # of steps that are remembered
_FEW = 64  # members of a collection, each of which is compared
_DRAWS = "the model draws random numbers from {}, and a graph would repeat them: let torch draw on the model's device"


class Watch:
    """Compares the Python state of some modules, and of an optimizer, from step to step."""

    def __init__(self, roots: Sequence[Any], sums: RunningSums, optimizer: torch.optim.Optimizer | None = None) -> None:
        """``sums``: which the steps log to."""
        self._optimizer, self._sums = optimizer, sums
        self._modules = [
            (f"{type(root).__name__}{'.' if name else ''}{name}", module)
            for root in roots
            if isinstance(root, torch.nn.Module)
            for name, module in root.named_modules()
        ]
        self._seen: dict[Hashable, dict[str, Any]] = {}  # after the newest step of each kind
        self._held: dict[int, torch.Tensor] = {}  # a graph may read them, also where the model has others by now
        self._drawn = _random_numbers()
        self._tossed = 0  # steps in a row that drew from PyTorch's CPU generator

    def before(self) -> None:
        """Call this before a step: random numbers drawn between steps do not count."""
        self._drawn = _random_numbers()

    def after(self, kind: Hashable = None) -> str | None:
        """Call this after a step of some kind. Returns why a graph would compute something else, or None."""
        drawn = [before != now for before, now in zip(self._drawn, _random_numbers(), strict=True)]
        self._tossed = self._tossed + 1 if drawn[2] else 0
        # Draws from PyTorch's CPU generator count from the second in a row: a compiler may draw in one step.
        for who, draws in (("Python's random", drawn[0]), ("numpy.random", drawn[1]), ("the CPU's", self._tossed > 1)):
            if draws:
                return _DRAWS.format(who)
        if (number := self._sums.logged_number) is not None:
            return f"the model logs {number!r} as a plain number, which a graph freezes: log a tensor of its device"
        seen, before = self._attributes(), self._seen.get(kind)
        name = next((name for name in seen if before is not None and seen[name] != before.get(name)), None)
        self._seen = {**dict(list(self._seen.items())[-_MOST_KINDS:]), kind: seen}
        if name is None:
            return None
        if isinstance(seen[name], bytes):
            return _DRAWS.format(name)
        return f"{name} changes from step to step, and a graph would freeze it: make it a buffer that changes in place"

    def _attributes(self) -> dict[str, Any]:
        seen = {
            f"{path}.{name}": self._look(value)
            for path, module in self._modules
            for named in (vars(module).items(), module.named_parameters("", False), module.named_buffers("", False))
            for name, value in named
            if name not in OF_EVERY_MODULE
        }
        for number, group in enumerate(self._optimizer.param_groups if self._optimizer is not None else ()):
            seen |= {f"{name!r} of the optimizer's group {number}": self._look(value) for name, value in group.items()}
        return seen

    def _look(self, value: object, depth: int = 3) -> Any:
        """A comparable summary of a value; None if the value is not compared."""
        value = object.__getattribute__(value, "_value") if isinstance(value, Unread) else value
        if isinstance(value, _PLAIN):
            return (type(value), value if value == value else "nan")  # NaN is not equal to itself
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:  # each step computes it again, as the weight of a layer with a norm for it
                return None
            self._held[id(value)] = value
            return ("tensor", id(value))
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
            return pickle.dumps(value)
        if not isinstance(value, (list, tuple, dict, set, deque)):
            return None
        members = value.values() if isinstance(value, dict) else value
        few = members if depth and len(value) <= _FEW else ()
        return ("length", len(value), *(self._look(member, depth - 1) for member in few))


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the caller has compiled the model or a part of it: then other code runs than its modules'."""
    return any(map(compat.is_compiled, model.modules()))


def hooks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """The reason why hooks prevent a graph, in which they would not run; PyTorch's and our own are fine."""
    for name, module in model.named_modules():
        if has_hook(module, compat.HOOKS_OF_MODULES):
            return f"the layer {name or type(module).__name__!r} has a hook, which would not run in a graph"
    for name, parameter in model.named_parameters():
        if has_hook(parameter, compat.HOOKS_OF_PARAMETERS):
            return f"the parameter {name!r} has a hook, which would not run in a graph"
    of_every_optimizer = has_hook(compat.hooks_of_every_optimizer(), ("before", "after"))
    optimizers = optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]
    if of_every_optimizer or any(has_hook(each, compat.HOOKS_OF_OPTIMIZERS) for each in optimizers):
        return "the optimizer has a hook, which would not run in a graph"
    return None


def has_hook(value: object, kinds: Sequence[str]) -> bool:
    """Whether there is a hook of these kinds that neither PyTorch nor the trainer has registered."""
    hooks = [hook for kind in kinds for hook in (getattr(value, kind, None) or {}).values()]
    modules = [getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks]
    return not all(str(module).startswith(("torch.", "manyhands.")) for module in modules)


def _random_numbers() -> tuple[Any, Any, Any]:
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False)), torch.get_rng_state().numpy().tobytes()


# Plain values


Report = Callable[[str], object]
_LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (torch, manyhands))
# What every object has, and what says nothing about the value.
_UNTOUCHED = {
    *("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__del__", "__dict__", "__slots__"),
    *("__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__class_getitem__", "__getnewargs__"),
}


class Unread:
    """A value that reports where it is read."""

    __slots__ = ("_report", "_value")

    def __init__(self, value: Any, report: Report) -> None:
        self._value, self._report = value, report

    def __getattr__(self, name: str) -> Any:
        return getattr(_read(self), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree.map_leaves(_value_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def unread(value: Any, report: Report) -> Any:
    """Something that can be used as the value can; ``report`` gets the line of each use."""
    return _class_for(value.__class__)(value, report)


@functools.cache
def _class_for(kind: Any) -> type[Unread]:
    """A class with the special methods of this one; ``isinstance`` takes its instances for this one's."""
    special = {name for name in dir(kind) if name.startswith("__") and callable(getattr(kind, name))} - _UNTOUCHED
    methods: dict[str, Any] = {name: _forward(name) for name in special}
    return type("Unread", (Unread,), {"__slots__": (), **methods, "__class__": property(lambda _: kind)})


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Unread, *args: Any) -> Any:
        return getattr(_read(self), name)(*map(_value_of, args))

    return method


def _value_of(value: Any) -> Any:
    return _read(value) if issubclass(type(value), Unread) else value


def _read(value: Any) -> Any:
    object.__getattribute__(value, "_report")(_line_outside())
    return object.__getattribute__(value, "_value")


def _line_outside() -> str:
    """The line of the user's code that is running, as ``file.py:31``."""
    return _first_outside(traceback.walk_stack(sys._getframe(1))) or "?"


def line_of_error(error: BaseException) -> str | None:
    """The line of the user's code that raised an error, or called what did; None: there is none."""
    return _first_outside(reversed([*traceback.walk_tb(error.__traceback__)]))


def _first_outside(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    places = ((frame.f_code.co_filename, line) for frame, line in frames)
    return next((f"{Path(file).name}:{line}" for file, line in places if not file.startswith(_LIBRARIES)), None)
