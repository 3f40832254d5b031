"""Which calls, arguments and results cannot be planned: :class:`CannotTrace` says why.

A plan runs operations on tensors and returns new tensors. It can do nothing else to arguments, and return nothing else.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from manyhands import tree
from manyhands.backends.torch.capture.trace import Trace, is_check
from manyhands.backends.torch.compat import tree_leaves
from manyhands.backends.torch.virtual import VirtualTensor
from manyhands.errors import CannotTrace, MustRunAsWritten, type_in_words
from manyhands.python_code.names import is_foreign

_OF_PYTHON = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range, slice, type)
BY_VALUE = (*_OF_PYTHON, torch.dtype, torch.device, torch.layout, torch.memory_format)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_SAME_OBJECT = (nn.Module, torch.optim.Optimizer, *_FUNCTIONS)
_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is written in Python


def refuse_uncomparable_arguments(tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> None:
    """Refuse arguments that cannot be compared with those of a later call."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter, VirtualTensor):
            raise MustRunAsWritten(f"an argument is not an ordinary tensor: {type(tensor).__name__}, {tensor.layout}")
    for leaf in others:
        if not isinstance(leaf, (*BY_VALUE, *_SAME_OBJECT)) and not _is_of_the_user(type(leaf)):
            raise CannotTrace(f"an argument is {type_in_words(leaf)}: its contents may change unnoticed")


def _is_of_the_user(kind: type) -> bool:
    """Whether all state of an object of this class can be watched: the class and its bases are written in Python."""
    base = kind
    while base.__flags__ & _IN_PYTHON and base.__base__ is not None:
        base = base.__base__
    return base is object and not is_foreign(kind)


def refuse_unknown_results(result: Any) -> None:
    for leaf in tree_leaves(result):
        if not isinstance(leaf, (torch.Tensor, *BY_VALUE)):
            raise CannotTrace(
                f"a result is {type_in_words(leaf)}: return tensors and numbers in lists, tuples, dicts and dataclasses"
            )
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
            raise CannotTrace(
                "a result carries gradients that would be computed later: compute them inside the function "
                "(loss.backward(), torch.autograd.grad), or call it under torch.no_grad()"
            )
        if isinstance(leaf, nn.Parameter) or (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
            raise CannotTrace(
                "a result is made to require gradients (requires_grad_(), nn.Parameter), which a plan cannot do: "
                "return the plain tensor, and make it a parameter outside"
            )


def refuse_changed_gradients(stand_ins: Sequence[torch.Tensor], recorded: Sequence[bool]) -> None:
    """Refuse a function that changes an argument's gradient, or whether it requires one (``recorded``: as it was)."""
    for stand_in, before in zip(stand_ins, recorded, strict=True):
        if stand_in.requires_grad != before:
            raise CannotTrace("it changes requires_grad of an argument")
        if stand_in.is_leaf and stand_in.grad is not None:
            raise CannotTrace(
                "backward() reaches an argument and would put a gradient into it: use torch.autograd.grad, or take the "
                "tensor from outside (a closure, a module)"
            )


def refuse_changed_forms(
    stand_ins: Sequence[torch.Tensor], forms: Sequence[tuple[torch.Size, tuple[int, ...]]]
) -> None:
    """Refuse a function that changes an argument's shape or strides (``forms``: as they were): trying plans would."""
    for stand_in, form in zip(stand_ins, forms, strict=True):
        if (stand_in.shape, stand_in.stride()) != form:
            raise CannotTrace(
                "it changes the shape or strides of an argument in place (x.t_(), x.unsqueeze_(0)): use the operation "
                "that returns a tensor (x.t(), x.unsqueeze(0))"
            )


def refuse_changed_containers(
    before: tuple[list[Any], tree.Structure], after: tuple[list[Any], tree.Structure]
) -> None:
    """Refuse a function that changes a list or dict among its arguments."""
    same = before[1] == after[1] and all(old is new for old, new in zip(before[0], after[0], strict=True))
    if not same:
        raise CannotTrace("it modifies a list or dict that it was passed: return the items as a result instead")


def refuse_late_checks(trace: Trace) -> None:
    """Refuse checks after which the function could not be called again as it is written, should they fail."""
    checks = [number for number, step in enumerate(trace.steps) if is_check(step.node)]
    if not checks:
        return
    name = trace.steps[checks[0]].task.name
    if trace.gpus():
        raise CannotTrace(f"it checks values on a GPU ({name}), and the host has to wait for them")
    of_caller = trace.callers_memories()
    if any(step.task.writes & of_caller for step in trace.steps[: checks[-1]]):
        raise CannotTrace(
            f"it checks values ({name}) after it has written to one of the caller's tensors: if the check fails, only "
            "plain execution leaves the right values behind; check before writing"
        )


def refuse_writes_to_shared_arguments(trace: Trace) -> None:
    """Refuse writes to arguments that share memory: the next call may share it in another way."""
    if trace.memories_of(trace.inputs) & trace.written_memories():
        raise MustRunAsWritten("two of the arguments share memory, and it writes to an argument")


def refuse_shared_results(trace: Trace) -> None:
    count = len(trace.outputs) - sum(there for _, there in trace.gradients)
    if trace.memories_of(trace.outputs[:count]) & trace.callers_memories():
        raise CannotTrace("a result is one of the arguments or a tensor from outside, or shares its memory")
