"""What ``mh.parallel`` needs of MXNet: functions run as they are, for its engine runs operations asynchronously.

Explicit tasks (:mod:`manyhands.tasks.scope`) ask about arrays, blocks and the modes of a thread.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from manyhands.addresses import Held

name = "mxnet"
RUN_AS = "written"
SCHEDULER = "MXNet's engine runs operations asynchronously, and at once where they share no memory"
PROFILER = "mx.profiler"


def hand_over(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


# Explicit tasks

_WHOLE = 1 << 20  # bytes of an array that are kept for comparison


def memory_of(value: Any) -> Any:
    """MXNet does not tell which arrays share memory: all of one context may, so a task that writes waits for all."""
    return ("context", value.ctx) if isinstance(value, mx.nd.NDArray) else id(value)


def parts_of(value: Any) -> Sequence[Any] | None:
    """What is read and written with an object.

    An array has its gradient, a parameter its arrays, a block its parameters, attributes and hooks and those of the
    blocks in it, a trainer the parameters that it moves and its notes about them.
    """
    if isinstance(value, mx.nd.NDArray):
        return () if (gradient := value.grad) is None else (gradient,)
    if isinstance(value, mx.gluon.Parameter):
        return [*(value._data or ())]
    if isinstance(value, mx.gluon.Block):
        return [*value.collect_params().values(), *(part for block in blocks_of(value) for part in _attributes(block))]
    if isinstance(value, mx.gluon.Trainer):
        return [*value._params, *(updater.states for updater in value._updaters)]
    return None


def blocks_of(block: Any) -> Iterator[Any]:
    """The block and all blocks in it."""
    yield block
    for child in block._children.values():
        yield from blocks_of(child)


def _attributes(block: Any) -> list[Any]:
    """What a block holds besides its parameters and blocks; of MXNet's own blocks only hooks."""
    by_name = vars(block)
    hooks = [*block._forward_hooks.values(), *block._forward_pre_hooks.values()]
    if type(block).__module__.startswith("mxnet."):
        return hooks
    return hooks + [value for name, value in by_name.items() if not name.startswith("_")]


def version_of(value: Any) -> Any:
    """MXNet does not count writes: an array is compared by its content, a large one by a checksum of it."""
    if isinstance(value, mx.nd.NDArray):
        content = value.asnumpy()
        return content.tobytes() if content.nbytes <= _WHOLE else zlib.adler32(np.ascontiguousarray(content).data)
    if isinstance(value, mx.gluon.Parameter):
        return None if value._data is None else Held([*value._data])  # values that a first call creates are no write
    return Held([*(parts_of(value) or ())]) if isinstance(value, mx.gluon.Block) else None


def exclusive(objects: list[Any]) -> list[Any]:
    """Blocks that two threads must not call at once: hybridized ones, and those whose parameters have no values yet."""
    blocks = {id(part): part for value in objects if isinstance(value, mx.gluon.Block) for part in blocks_of(value)}
    return [block for block in blocks.values() if _is_cached(block) or _is_deferred(block)]


def _is_cached(block: Any) -> bool:
    return isinstance(block, mx.gluon.SymbolBlock) or getattr(block, "_active", False)


def _is_deferred(block: Any) -> bool:
    return any(parameter._data is None for parameter in block._reg_params.values())


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """MXNet's modes belong to a thread: a task gets those of the thread that submits it."""
    recording, training = mx.autograd.is_recording(), mx.autograd.is_training()
    shapes, arrays, context = mx.util.is_np_shape(), mx.util.is_np_array(), mx.current_context()

    def run(*arguments: Any, **keywords: Any) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            stack.enter_context(mx.util.np_shape(shapes))
            stack.enter_context(mx.util.np_array(arrays))
            if recording:
                stack.enter_context(mx.autograd.record(train_mode=training))
            elif training:
                stack.enter_context(mx.autograd.train_mode())
            return function(*arguments, **keywords)

    return run
