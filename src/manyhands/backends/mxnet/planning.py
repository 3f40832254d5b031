"""MXNet as a :class:`~manyhands.backends.runtime.Runtime`: operations recorded as they run, and CachedOp.

MXNet 1.9 has no tracer. Its engine runs operations asynchronously, and at the same time where they do not touch the
same memory, so plain execution is already parallel. A function is known by what one call of it did: in its first call
every operation is recorded where Python hands it to the engine, waited for, and timed.

If that call consisted only of operations on arguments and known arrays (no values read, nothing written in place, no
random numbers), they are combined to a symbol and run as one ``CachedOp``, as ``hybridize()`` does: the engine gets all
of them at once, and Python's time for each is saved.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mxnet as mx

from manyhands.addresses import Held
from manyhands.backends.mxnet import graph
from manyhands.backends.mxnet import tasks as tasks
from manyhands.backends.runtime import PLAIN_VALUES, Call, Traced, Tracer
from manyhands.backends.runtime import flatten as flatten
from manyhands.errors import CannotTrace, NotYet, first_line

name = "mxnet"
WAY = "one CachedOp"
BATCH = "mx.nd.batch_dot of stacked arrays (mx.nd.stack) makes them one operation"
LANES = "the engine has MXNET_CPU_WORKER_NTHREADS workers for each CPU context"
PROFILER = "MXNet reports when each operation ran in its own profiler: use mx.profiler"
BY_VALUE: tuple[type, ...] = (*PLAIN_VALUES, mx.Context)
_HEAVY = ("dot", "batch_dot", "FullyConnected", "Convolution")


def is_tracing(leaves: Sequence[Any]) -> bool:
    return any(isinstance(leaf, mx.sym.Symbol) for leaf in leaves)


def form(leaf: Any) -> Hashable | None:
    return (*kind(leaf), leaf.shape, leaf.dtype) if isinstance(leaf, mx.nd.NDArray) else None


def modes() -> Hashable:
    return tasks.modes()


def version_of(value: Any) -> Any:
    """An array is read in place; a parameter is traced as its arrays, a block with its current attributes."""
    if isinstance(value, mx.gluon.Parameter):
        return Held([value._data, *(value._data or ())])
    if not isinstance(value, mx.gluon.Block):
        return None
    parts = [part for block in tasks.blocks_of(value) for name, part in vars(block).items() if not name.startswith("_")]
    return Held([*value.collect_params().values(), *parts])


def observe(call: Call) -> tuple[Any, Tracer]:
    """Run the call and record its operations."""
    with graph.Recording() as recording:
        recording.result = call.plainly()
    return wait(recording.result), functools.partial(trace, call, recording)


def wait(result: Any) -> Any:
    mx.nd.waitall()
    return result


def variables(reached: Sequence[Any]) -> list[tuple[Any, Any]]:
    """None: a function that writes to arrays is not tried."""
    return []


def with_values(values: Sequence[tuple[Any, Any]]) -> AbstractContextManager[None]:
    return nullcontext()


def numbers(leaf: Any) -> Any:
    return leaf.asnumpy() if isinstance(leaf, mx.nd.NDArray) else None


def kind(leaf: Any) -> Any:
    return type(leaf), leaf.ctx, leaf.stype


def lanes(device: str) -> int:
    """The engine's workers for a context."""
    variable, usual = ("MXNET_GPU_WORKER_NTHREADS", 2) if device.startswith("gpu") else ("MXNET_CPU_WORKER_NTHREADS", 1)
    setting = os.environ.get(variable, "")
    return max(1, int(setting)) if setting.isdecimal() else usual


def trace(call: Call, seen: graph.Recording, reached: Sequence[Any]) -> Traced:
    if not seen.complete:
        raise NotYet("another function is being planned")
    seen.must_be_all()
    forms = [
        f"{operation.name} {[a.shape for a in operation.inputs]}" if operation.name in _HEAVY else ""
        for operation in seen.operations
    ]
    traced = Traced(graph.tasks(seen), measured=True, forms=forms)
    reason = graph.why_not_one(seen, tasks.modes())
    if reason is None:
        try:
            traced.run = graph.one_operation(call, seen, {id(value) for value in reached})
        except CannotTrace as error:
            reason = str(error)
        except Exception as error:
            reason = first_line(error)
    if reason is not None:
        traced.notes.append(f"{WAY} is not used: {reason}")
    return traced
