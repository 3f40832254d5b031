"""Wrap the calls of PyTorch that can wait. Methods are replaced on ``torch.Tensor``, functions in their modules.

Not chosen: ``torch.cuda.set_sync_debug_mode`` (its warnings go through the program's filters, have no times and miss
``synchronize`` and pageable copies with ``non_blocking=True``) and modes (they cost microseconds for each operation).
A wrapper costs a fraction of a microsecond without a sink, and only in the calls of the table.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from manyhands.audit import sites, watch
from manyhands.audit.cure import Stall
from manyhands.audit.kinds import NUMBER, Kind
from manyhands.audit.torch import calls
from manyhands.audit.wrapping import Installation, StepListeners
from manyhands.backends.torch import compat, devices, virtual
from manyhands.backends.torch.cuda_stand_in import streams
from manyhands.backends.torch.virtual import VirtualTensor

_is_compiling = torch.compiler.is_compiling
# The function mode of virtual devices calls again what was called: once is enough.
_TRANSLATED = virtual.NameTranslation.__torch_function__.__code__


class _OptimizerSteps(StepListeners):
    """PyTorch tells of the steps of all optimizers by a hook, which stays no longer than somebody listens."""

    def __init__(self) -> None:
        super().__init__()
        self._hook: Any = None

    def listen(self, listener: Callable[[object, bool], None]) -> None:
        super().listen(listener)
        self._hook = register_optimizer_step_post_hook(self._after)

    def stop(self) -> None:
        super().stop()
        if self._hook is not None:
            self._hook.remove()

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not _is_compiling():
            self.note_end(id(optimizer))


steps = _OptimizerSteps()
installation = Installation("torch", calls.on_device, virtual.count, torch.accelerator.device_count)


def stand_in() -> None:
    """Let a virtual device stand in for a GPU."""
    if not virtual.count():
        devices.virtual_devices(1, as_cuda=True)


def used_device() -> bool:
    """Whether the program used a GPU. What stands in for one is noticed when something is launched there."""
    return not virtual.count() and torch.cuda.is_initialized()


def install() -> None:
    """Wrap everything, once; the wrappers stay, and do nothing without a sink."""
    if not installation.begins():
        return
    compat.device_constructors()  # it remembers functions as they are now
    for name, rule in calls.METHODS.items():
        for owner in (torch.Tensor, VirtualTensor):  # a virtual tensor overrides some of them
            if owner is torch.Tensor or name in vars(owner):
                wrapped = _wrap(getattr(owner, name), f"Tensor.{name}", rule)
                if owner is not torch.Tensor or name != "__getitem__":
                    setattr(owner, name, wrapped)
                else:
                    compat.replace_getitem(wrapped)
    for name, rule in calls.FUNCTIONS.items():
        setattr(torch, name, _wrap(getattr(torch, name), f"torch.{name}", rule))
    for name in calls.OF_LINALG:
        rule = calls.of_first(Kind.CHECK)
        setattr(torch.linalg, name, _wrap(getattr(torch.linalg, name), f"torch.linalg.{name}", rule))
    functional = torch.nn.functional
    functional.one_hot = _wrap(functional.one_hot, "one_hot", calls.one_hot_rule)
    _wrap_synchronizing()
    _wrap_collectives()
    _wrap_loader()
    virtual.observers.append(_number_read)


def _wrap(original: Any, call: str, rule: calls.Rule) -> Any:
    def waits(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or not watch.listening or sys._getframe(1).f_code is _TRANSLATED:
            return original(*args, **kwargs)
        try:
            wait = rule(args, kwargs)
        except Exception:  # arguments that no call takes: PyTorch says so better
            wait = None
        if wait is None:
            return original(*args, **kwargs)
        with watch.Waiting(wait.kind, call, wait.nbytes):
            return original(*args, **kwargs)

    functools.update_wrapper(waits, original)
    if original in virtual.instead:  # a function mode is given the method that the class has
        virtual.instead[waits] = virtual.instead[original]
    compat.skip_code(waits.__code__)
    return waits


def _number_read(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """PyTorch has read a number of a virtual tensor, of which no call of the table tells: ``torch.zeros(n)``."""
    if watch.listening and func is compat.READ_OF_A_NUMBER:
        with watch.Waiting(Kind.READ, NUMBER, args[0].element_size()):
            pass


def _wrap_synchronizing() -> None:
    """The calls that wait for everything, also those of virtual devices that stand in for GPUs."""

    def always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> calls.Wait | None:
        return calls.Wait(Kind.SYNCHRONIZE, 0) if torch.cuda.is_available() else None

    accelerator: Any = torch.accelerator
    owners: list[tuple[Any, str]] = [(torch.cuda, "torch.cuda"), (accelerator, "torch.accelerator")]
    owners += [(kind, f"torch.cuda.{kind.__name__}") for kind in (torch.cuda.Stream, torch.cuda.Event)]
    owners += [(kind, f"torch.cuda.{kind.__name__}") for kind in (streams.Stream, streams.Event)]
    owners += [(streams, "torch.cuda")]
    for owner, name in owners:
        if not hasattr(owner.synchronize, "__wrapped__"):
            owner.synchronize = _wrap(owner.synchronize, f"{name}.synchronize", always)


def _wrap_collectives() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not torch.distributed.is_available():
        return

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> calls.Wait | None:
        group = kwargs.get("group")
        if kwargs.get("async_op") or torch.distributed.get_backend(group) == "nccl":
            return None  # NCCL's are ordered on the device: the host goes on
        return calls.of_any(Kind.COLLECTIVE)(_flat(args), kwargs)

    def barrier(args: tuple[Any, ...], kwargs: dict[str, Any]) -> calls.Wait | None:
        return None if kwargs.get("async_op") else calls.Wait(Kind.COLLECTIVE, 0)

    for name in calls.COLLECTIVES:
        if hasattr(distributed, name):
            setattr(distributed, name, _wrap(getattr(distributed, name), f"torch.distributed.{name}", rule))
    distributed.barrier = _wrap(distributed.barrier, "torch.distributed.barrier", barrier)  # type: ignore[attr-defined]


def _flat(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for arg in args for value in (arg if isinstance(arg, (list, tuple)) else (arg,)))


def _wrap_loader() -> None:
    """The time that a program waits for a batch. What waits inside of a loader is reported as well."""
    iterator = compat.data_loader_iterator()
    original = iterator.__next__

    def __next__(self: Any) -> Any:
        if not watch.listening:
            return original(self)
        begin = time.perf_counter()
        batch = original(self)
        seconds = time.perf_counter() - begin
        site, sinks = sites.current(), [sink for sink in watch.sinks() if hasattr(sink, "step")]
        if site is not None and sinks:
            event = watch.WaitEvent(Stall(Kind.LOADER, "DataLoader", site), begin, seconds)
            for sink in sinks:  # those that know of steps: a loader's time alone is not a fault
                sink.after(event)
        return batch

    iterator.__next__ = functools.update_wrapper(__next__, original)
    compat.skip_code(__next__.__code__)
