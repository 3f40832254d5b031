"""Which parts of a batch a model takes: data for prediction may come with their targets or without."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def input_count(call: Callable[..., Any], parts: int) -> int:
    """How many parts of a batch are inputs of a model that is called in this way; one behind them is the target.

    As in training, the last part is the target. It is an input where the model needs it, because its signature takes
    all parts and no fewer.

    >>> input_count(lambda x: x, 1), input_count(lambda x: x, 2), input_count(lambda x, mask: x, 2)
    (1, 1, 2)
    """
    if parts < 2:
        return parts
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return parts - 1
    return parts if not _takes(signature, parts - 1) and _takes(signature, parts) else parts - 1


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
