"""``parallel(fn)`` in MXNet: the function itself, whose operations the engine runs asynchronously."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from manyhands.backends.mxnet import tasks as tasks

name = "mxnet"
RUN_AS = "written"
SCHEDULER = "MXNet's engine runs operations asynchronously, and at once where they share no memory"
PROFILER = "mx.profiler"


def hand_over(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
