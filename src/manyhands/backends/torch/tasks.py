"""What explicit tasks need of PyTorch (:mod:`manyhands.tasks.scope`): memory, parts of objects, modes of a thread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch

from manyhands.addresses import Held, content
from manyhands.backends.torch import compat
from manyhands.backends.torch.run.threads import initialize_vector_math
from manyhands.backends.torch.virtual import inside

# Bytes of a tensor that are compared whole; blocks of a larger one. PyTorch itself counts nearly all writes.
_WHOLE, _BLOCKS = 1 << 16, 4


def memory_of(value: Any) -> Hashable:
    """The addresses of a tensor's memory, all of it; other objects are known by themselves."""
    span = compat.span_of(inside(value))
    return id(value) if span is None else span


def parts_of(value: Any) -> Sequence[Any] | None:
    """What is read and written with an object; None where PyTorch has nothing to say of it.

    A tensor has its gradient; a module its parameters, buffers, attributes and hooks, and those of the modules in it;
    an optimizer the weights that it moves and its notes about them.
    """
    if isinstance(value, torch.Tensor):
        return (value.grad,) if value.requires_grad and value.is_leaf and value.grad is not None else ()
    if isinstance(value, torch.nn.Module):
        return _parts_of_module(value)
    if isinstance(value, torch.optim.Optimizer):
        weights = [weight for group in value.param_groups for weight in group["params"]]
        return weights + [note for notes in [*value.state.values()] for note in [*notes.values()]]
    return () if isinstance(value, (torch.dtype, torch.device, torch.Generator)) else None


_NAMES = frozenset(vars(torch.nn.Module()))


def _parts_of_module(module: torch.nn.Module) -> list[Any]:
    """Of PyTorch's own modules without attributes: what can change in them are parameters and buffers."""
    parts: list[Any] = []
    for inner in module.modules():
        held = inner.__dict__
        for name in (compat.PARAMETERS, compat.BUFFERS, *compat.HOOKS_OF_FORWARD):
            parts += held[name].values()
        if not type(inner).__module__.startswith("torch."):
            parts += [part for name, part in held.items() if name not in _NAMES]
    return parts


def version_of(value: Any) -> Any:
    """PyTorch counts the writes to a tensor, except to one made in inference mode.

    It does not count those through ``.data`` and NumPy: on the host the content is compared, a large one's in a few
    places. The gradient of a weight is a part of it: ``loss.backward()`` makes it, or adds to it. Of a module it is
    compared which parameters, buffers and attributes it has, and whether it trains.
    """
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Module):
            return None
        return Held([*_parts_of_module(value), *(module.training for module in value.modules())])
    try:
        version = compat.write_count(value)
    except RuntimeError:
        if not value.is_inference():  # not asked first: it lets other threads go before
            raise
        version = 0
    inner = inside(value)
    span = compat.span_of(inner) if inner.is_cpu else None
    gradient = id(value.grad) if value.requires_grad and value.is_leaf else 0
    return version, gradient, span and content(span, _WHOLE, _BLOCKS)


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's modes are a thread's own: the task's thread does as the one that gave it.

    Carried along: inference mode, whether gradients are recorded, autocast, the default device, and the current GPU
    with its stream. The random generators are the process's: which of several tasks draws first is not known, so tasks
    that draw take a generator each, or write one object.
    """
    initialize_vector_math()
    return functools.partial(_under, _modes(), torch.is_grad_enabled(), function)


def _under(modes: _Modes, recorded: bool, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """A call under these modes, with gradients recorded or not."""
    there, before = _modes(), torch.is_grad_enabled()
    try:
        with _SAME if there == modes else _change(there, modes):
            compat.set_grad_enabled(recorded)
            return function(*arguments, **keywords)
    finally:  # the function may have called set_grad_enabled or set_stream without a with
        compat.set_grad_enabled(before)
        if there[-1] is not None:
            torch.cuda.set_stream(there[-1])


_SAME = nullcontext()
# Inference mode; whether there is autocast on the CPU and on GPUs, False where on no device; its dtypes there; whether
# cast weights are kept; the default device; the GPU's stream.
_Modes = tuple[
    bool, tuple[bool, bool] | Literal[False], torch.dtype, torch.dtype, bool, torch.device, torch.cuda.Stream | None
]
_CPU = torch.device("cpu")


def _modes() -> _Modes:
    """This thread's modes, as a tuple: quickly made and compared."""
    return (
        torch.is_inference_mode_enabled(),
        compat.is_any_autocast_enabled() and (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        # A default device is a mode on this stack; to ask which takes longer than all the rest.
        torch.get_default_device() if compat.count_function_modes() else _CPU,
        torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
    )


@contextmanager
def _change(there: _Modes, wanted: _Modes) -> Iterator[None]:
    """This thread's modes, which are these, made those that are wanted."""
    inference, casts, cpu_dtype, gpu_dtype, cached, device, stream = wanted
    on_cpu, on_gpu = casts or (False, False)
    with ExitStack() as modes:
        if stream is not None:
            modes.enter_context(torch.cuda.stream(stream))
        if there[0] != inference:
            modes.enter_context(torch.inference_mode(inference))
        if there[1:5] != wanted[1:5]:
            # In this order: where virtual devices stand in for GPUs, the first sets the CPU too.
            modes.enter_context(torch.autocast("cuda", gpu_dtype, on_gpu, cached))
            modes.enter_context(torch.autocast("cpu", cpu_dtype, on_cpu, cached))
        if there[5] != device:
            modes.enter_context(device)
        yield
