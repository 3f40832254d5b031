"""Turns a failed trace into a helpful message: what the function does, on which line, and what to write instead.

PyTorch says ``GuardOnDataDependentSymNode: Could not guard on data-dependent expression Eq(u0, 1)``. That means that
the function needs a tensor's value before anything is computed, as ``if x.sum() > 0`` does. The traceback shows where:
in the innermost frame that belongs neither to PyTorch, nor to Python, nor to manyhands.

Dynamo says ``Unsupported Tensor.item() call with capture_scalar_outputs=False`` where it leaves a function to Python.
"""

from __future__ import annotations

import functools
import linecache
import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import GraphModule

import manyhands
from manyhands.backends.torch.compat import DataDependentOutputException, DynamicOutputShapeException, stack_of


@dataclass(frozen=True, slots=True)
class Break:
    """A line at which a function cannot be captured further: Python does it, and a new piece begins behind it."""

    file: str
    line: int
    function: str
    code: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}: {self.code}  ({self.reason})"


_LONGEST = 60  # characters of a line that is shown
FROM_SHAPE = "what comes after it cannot be planned; for a mask, torch.where(mask, x, 0) keeps the shape"


def why(error: BaseException) -> str:
    """The reason in one line."""
    # Imports SymPy, which takes a second.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    text = str(error).partition("\n")[0]
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape of a result depends on values{_where(error)}: {FROM_SHAPE}"
    if isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException)):
        return (
            f"it needs a tensor's value in Python{_where(error)}: torch.where(condition, a, b) "
            "decides on the device, and a number that is only computed with can stay a tensor"
        )
    if text.startswith(".numpy()"):
        return f"it converts a tensor to NumPy{_where(error)}: PyTorch's own functions can be planned"
    return f"{type(error).__name__}: {text}{_where(error)}"


def _where(error: BaseException) -> str:
    """The user's innermost line in the traceback, or an empty text."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if not is_users(code.co_filename):
            continue
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        shown = f": {_shorten(text)}" if text else ""
        return f" (in {code.co_name}, line {line} of {Path(code.co_filename).name}{shown})"
    return ""


# How Dynamo describes a graph break, and what that means; {0} is the name in backticks in its explanation.
_BREAKS = (
    ("tensor.item", "a tensor's value is read in Python"),
    ("tensor.tolist", "a tensor's values are read in Python"),
    ("numpy", "a tensor goes to NumPy, or comes from there"),
    ("data-dependent", "a branch depends on a tensor's values"),
    ("generic_jump", "a branch depends on a tensor's values"),
    ("dynamic shape operator", "the shape of a result depends on values"),
    ("tensor.backward", "the backward pass starts here: it is planned apart from the forward pass"),
    ("requires_grad_", "a tensor is made to require gradients"),
    ("graph_break()", "PyTorch's optimizers run without a plan"),
    ("failed to trace builtin", "{0}() is left to Python"),
    ("marked as skipped", "{0}() is left to Python"),
    ("unsupported method call", "{0}() is left to Python"),
)


def break_of(error: BaseException) -> Break | None:
    """Where Dynamo stopped, and why; None if that is not in the user's code."""
    lines = [frame for frame in stack_of(error) if is_users(frame.filename)]
    if not lines:
        return None
    frame = lines[-1]
    # Dynamo resumes in generated functions: torch_dynamo_resume_in_step_at_14.
    name = re.sub(r"^(torch_dynamo_resume_in_)+|(_at_\d+)+$", "", frame.name)
    text = linecache.getline(frame.filename, frame.lineno or 0).strip() or (frame.line or "")
    return Break(Path(frame.filename).name, frame.lineno or 0, name, _shorten(text), _words(str(error)))


def _words(text: str) -> str:
    summary, _, rest = text.partition("Explanation:")
    explanation = rest.strip().partition("\n")[0]
    named = re.search(r"`([^`]+?)\.?`", explanation)
    first = summary.strip().partition("\n")[0]
    for word, meaning in _BREAKS:
        if word in first.lower() or (word == "graph_break()" and word in text):
            return meaning.format(named[1].removeprefix("builtins.") if named else "a function")
    return f"Dynamo cannot trace it ({first})"


def is_users(filename: str) -> bool:
    """Whether a file is the user's: not PyTorch's, not Python's, not ours."""
    return not filename.startswith(_not_users())


@functools.cache
def _not_users() -> tuple[str, ...]:
    packages = [str(Path(package.__path__[0])) for package in (torch, manyhands)]
    return (*packages, sysconfig.get_paths()["stdlib"], "<manyhands", "<frozen")


def _shorten(text: str) -> str:
    return f"{text[:_LONGEST]}{'...' if len(text) > _LONGEST else ''}"


def lines_of(module: GraphModule, name: str) -> str:
    """The user's lines that a graph was captured from."""
    lines: dict[str, list[int]] = {}
    for node in module.graph.nodes:
        line = _line_of(node.meta.get("stack_trace") or "")
        if line is not None:
            lines.setdefault(line[0], []).append(line[1])
    if not lines:  # only PyTorch's own layers
        return name
    file, numbers = max(lines.items(), key=lambda pair: len(pair[1]))
    first, last = min(numbers), max(numbers)
    return f"{Path(file).name}:{first}" + (f"-{last}" if last > first else "")


def _line_of(stack: str) -> tuple[str, int] | None:
    """The user's innermost line: PyTorch writes ``File "train.py", line 14, in step``."""
    frames = re.findall(r'^ *File "(.+)", line (\d+)', stack, re.MULTILINE)
    return next(((file, int(line)) for file, line in reversed(frames) if is_users(file)), None)
