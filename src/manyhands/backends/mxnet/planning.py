"""What :mod:`manyhands.parallel.delegated` needs of MXNet: operations noted as they run, and CachedOp.

MXNet 1.9 has no tracer: its engine runs operations asynchronously, those that do not touch the same memory at the same
time, whatever Python does. So plain execution is parallel already. What is seen of a function is what one call of it
did: in its first call every operation is noted where Python hands it to the engine, waited for, and timed.

If that call was nothing but operations on arguments and known arrays (no values read, nothing written in place, no
random numbers), they are put together to a symbol and run as one ``CachedOp``, which is what ``hybridize()`` does: the
engine gets all of them at once, and Python's time for each is saved.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import mxnet as mx
import numpy as np

from manyhands import tree
from manyhands.addresses import Held
from manyhands.backends.mxnet.graph import Recording, one_operation, tasks, why_not_one
from manyhands.backends.traced import Call, Same, Traced, compared, content_of, refuse_unknown, told
from manyhands.errors import CannotTrace, NotYet

name = "mxnet"
PLAINLY = "MXNet's engine runs operations as soon as what they touch is free"
BATCH = "mx.nd.batch_dot of stacked arrays (mx.nd.stack) makes them one operation"
LANES = "the engine has MXNET_CPU_WORKER_NTHREADS workers for each CPU context"
PROFILER = "mx.profiler writes when MXNet's engine ran which operation"
_WAY = "one CachedOp"
_HEAVY = ("dot", "batch_dot", "FullyConnected", "Convolution")
_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), range, slice, type, mx.Context)


# Calls


def call(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call | None:
    """The call by which calls like it are known; None where a symbol is being composed."""
    leaves, structure = tree.flatten((arguments, keywords))
    tensors: list[Any] = []
    others: list[Any] = []
    known: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, mx.sym.Symbol):
            return None
        if isinstance(leaf, mx.nd.NDArray):
            tensors.append(leaf)
            known.append((type(leaf), leaf.shape, leaf.dtype, leaf.ctx, leaf.stype))
        else:
            others.append(leaf)
            known.append((type(leaf), repr(leaf)) if isinstance(leaf, _BY_VALUE) else Same(leaf))

    def rebuild(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = iter(values)
        return structure.unflatten(next(given) if isinstance(leaf, mx.nd.NDArray) else leaf for leaf in leaves)  # type: ignore[return-value]

    same = len({id(tensor) for tensor in tensors}) < len(tensors)
    return Call(arguments, keywords, tensors, others, (structure, tuple(known), same, _modes()), rebuild)


def _modes() -> tuple[Any, ...]:
    autograd = mx.autograd
    numpy_modes = mx.util.is_np_shape(), mx.util.is_np_array()
    return autograd.is_recording(), autograd.is_training(), *numpy_modes, mx.current_context()


def parts(value: Any) -> Iterable[tuple[str, Callable[[], Any]]] | None:
    """An array is read where it is; a block is its settings, parameters and children."""
    if isinstance(value, mx.nd.NDArray):
        return ()
    if isinstance(value, np.ndarray):
        return content_of(value)
    if isinstance(value, mx.gluon.Parameter):
        own = vars(value)
        return [(word, functools.partial(own.get, word)) for word in ("_data", "_ctx_list") if word in own]
    if isinstance(value, mx.gluon.Block):
        own = vars(value)
        words = [w for w in own if not w.startswith("_") or w in ("_children", "_reg_params", "_active", "_kwargs")]
        return [(word, functools.partial(own.get, word)) for word in words if word != "prefix"]
    return None


# Running


def observe(function: Callable[..., Any], one: Call) -> tuple[Any, Recording]:
    """Plain execution, operation by operation, noted."""
    with Recording() as recording:
        recording.result = function(*one.arguments, **one.keywords)
    return wait(recording.result), recording


def wait(result: Any) -> Any:
    mx.nd.waitall()
    return result


@contextlib.contextmanager
def untouched(traced: Traced) -> Iterator[Callable[[], None]]:
    """What writes to arrays is not tried out."""
    yield lambda: None


def outcome(result: Any, traced: Traced) -> list[Any]:
    return tree.flatten(result)[0]


def equal(ones: Sequence[Any], others: Sequence[Any]) -> tuple[bool, float]:
    return compared(ones, others, _numbers, lambda x: (type(x), x.ctx, x.stype))


def _numbers(value: Any) -> Any:
    return value.asnumpy() if isinstance(value, mx.nd.NDArray) else None


def lanes(device: str) -> int:
    """How many operations of a context run at once: the engine's workers for it."""
    name, usual = ("MXNET_GPU_WORKER_NTHREADS", 2) if device.startswith("gpu") else ("MXNET_CPU_WORKER_NTHREADS", 1)
    told_so = os.environ.get(name, "")
    return max(1, int(told_so)) if told_so.isdecimal() else usual


# What was seen


def trace(function: Callable[..., Any], one: Call, outside: Any, seen: Recording) -> Traced:
    refuse_unknown(one.others, lambda value: isinstance(value, _BY_VALUE) or outside.watches(value))
    if not seen.complete:
        raise NotYet("another function is being planned")
    forms = [f"{one.name} {[a.shape for a in one.inputs]}" if one.name in _HEAVY else "" for one in seen.operations]
    traced = Traced(tasks(seen), _WAY, None, "measured one by one, in the first call", forms=forms)
    reason = why_not_one(seen, one.signature[-1])
    if reason is None:
        try:
            traced.compiled = one_operation(one, seen, outside.reaches)
        except CannotTrace as error:
            reason, traced.missing = str(error), "what is done without Python's knowledge is not in it"
        except Exception as error:
            reason = told(error)
    if reason is not None:
        traced.notes.append(f"{_WAY} is not used: {reason}")
    return traced


# What explicit tasks need of MXNet (manyhands.tasks.scope)


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
        return [*value.collect_params().values(), *(part for block in _blocks(value) for part in _attributes(block))]
    if isinstance(value, mx.gluon.Trainer):
        return [*value._params, *(updater.states for updater in value._updaters)]
    return None


def _blocks(block: Any) -> Iterator[Any]:
    yield block
    for child in block._children.values():
        yield from _blocks(child)


def _attributes(block: Any) -> list[Any]:
    """What a block holds besides its parameters and blocks; of MXNet's own blocks only hooks."""
    own = vars(block)
    hooks = [*block._forward_hooks.values(), *block._forward_pre_hooks.values()]
    if type(block).__module__.startswith("mxnet."):
        return hooks
    return hooks + [one for name, one in own.items() if not name.startswith("_")]


def version_of(value: Any) -> Any:
    """MXNet does not count writes: an array is its content, which is waited for; a large one's is summed up."""
    if isinstance(value, mx.nd.NDArray):
        content = value.asnumpy()
        return content.tobytes() if content.nbytes <= _WHOLE else zlib.adler32(np.ascontiguousarray(content).data)
    if isinstance(value, mx.gluon.Parameter):
        return None if value._data is None else Held([*value._data])  # values that a first call makes are no write
    return Held([*(parts_of(value) or ())]) if isinstance(value, mx.gluon.Block) else None


def in_turn(objects: list[Any], words: Set[str]) -> list[Any]:
    """Blocks that two threads must not call at once: hybridized ones, and those whose parameters have no values yet."""
    blocks = {id(part): part for one in objects if isinstance(one, mx.gluon.Block) for part in _blocks(one)}
    return [block for block in blocks.values() if _is_cached(block) or _is_deferred(block)]


def _is_cached(block: Any) -> bool:
    return isinstance(block, mx.gluon.SymbolBlock) or getattr(block, "_active", False)


def _is_deferred(block: Any) -> bool:
    return any(parameter._data is None for parameter in block._reg_params.values())


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """MXNet's modes are a thread's own: the task's thread does as the one that gave it."""
    recording, training, shapes, arrays, context = _modes()

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
