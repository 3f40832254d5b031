"""Makes PyTorch's attention layers take the same path while they are traced as in plain execution.

In eval mode ``nn.MultiheadAttention`` and the transformer layers are one fast operation. When they are traced they take
a longer path, which copies queries, keys and values once more. They call two functions of PyTorch to find out whether
they are traced; here both answer as in plain execution, in a thread that traces.
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
_tracing: Counter[int] = Counter()  # the number of traces in progress, by thread
_replacements = Replacements()
_has_torch_function: Any = torch.overrides.has_torch_function
_is_make_fx_tracing: Any = activation._is_make_fx_tracing
_disabled = torch._C._disabled_torch_function_impl


@contextmanager
def attention_as_in_plain_execution() -> Iterator[None]:
    """Enter it before the modes of a trace: modes that are active already count as the user's."""
    if function_mode_stack():  # the user's: plain execution takes the longer path, too
        yield
        return
    thread = threading.get_ident()
    with _lock:
        if not _tracing:
            _replacements.replace(torch.overrides, "has_torch_function", _has_subclass)
            _replacements.replace(activation, "_is_make_fx_tracing", _is_user_tracing)
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


def _has_subclass(values: Iterable[Any]) -> Any:
    if threading.get_ident() not in _tracing:
        return _has_torch_function(values)
    return any(_defines_torch_function(type(value)) for value in values)


def _defines_torch_function(kind: type) -> bool:
    if kind in (torch.Tensor, nn.Parameter):
        return False
    return getattr(kind, "__torch_function__", _disabled) is not _disabled


def _is_user_tracing() -> Any:
    return False if threading.get_ident() in _tracing else _is_make_fx_tracing()
