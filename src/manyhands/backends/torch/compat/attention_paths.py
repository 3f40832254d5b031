"""Makes PyTorch's attention layers take the same path while they are traced as in plain execution.

In eval mode ``nn.MultiheadAttention`` and the transformer layers are one fast operation. When they are traced they take
a longer path, which copies queries, keys and values once more. They ask PyTorch two questions to find out whether they
are traced; in a thread that traces, both get the answers of plain execution here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import activation
from torch.overrides import _get_current_function_mode_stack as function_mode_stack

from manyhands.backends.torch.replacements import Replacements

_lock = threading.Lock()
_tracing: Counter[int] = Counter()  # by thread, how many traces are under way
_replacements = Replacements()
_has_torch_function: Any = torch.overrides.has_torch_function
_is_make_fx_tracing: Any = activation._is_make_fx_tracing
_disabled = torch._C._disabled_torch_function_impl


@contextmanager
def attention_as_in_plain_execution() -> Iterator[None]:
    """To be entered before the modes of a trace; modes that are there already count as the user's."""
    if function_mode_stack():  # of the user: plain execution takes the longer path, too
        yield
        return
    thread = threading.get_ident()
    with _lock:
        if not _tracing:
            _replacements.replace(torch.overrides, "has_torch_function", _asks_for_subclasses)
            _replacements.replace(activation, "_is_make_fx_tracing", _asks_for_tracers)
        _tracing[thread] += 1
    try:
        yield
    finally:
        with _lock:
            _tracing[thread] -= 1
            if not _tracing[thread]:
                del _tracing[thread]
            if not _tracing:
                _replacements.undo()


def _asks_for_subclasses(values: Iterable[Any]) -> Any:
    if threading.get_ident() not in _tracing:
        return _has_torch_function(values)
    return any(_is_handled_by_class(type(value)) for value in values)


def _is_handled_by_class(kind: type) -> bool:
    if kind in (torch.Tensor, nn.Parameter):
        return False
    return getattr(kind, "__torch_function__", _disabled) is not _disabled


def _asks_for_tracers() -> Any:
    return False if threading.get_ident() in _tracing else _is_make_fx_tracing()
