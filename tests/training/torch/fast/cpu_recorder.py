"""Records the work of a step on a CPU, as a CUDA graph does on a GPU: everything but the GPU is real.

Recording runs the work's Python code once, undoes what it wrote, and keeps its operations with the tensors that they
were given. A replay runs these operations again, on the same memory: what Python would do otherwise is frozen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.training.torch.fast.recorder import NotRecorded

_HOST = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}  # wait for the device


def _name(func: Any) -> str:
    return str(func._schema.name)


def _check(func: Any) -> None:
    namespace, name = _name(func).split("::")
    if name in _HOST:
        raise RuntimeError(f"{name} waits for the device: it cannot be captured")
    if namespace == "c10d":
        raise RuntimeError(f"{name} in a capture: all ranks would have to replay it together")


class Rehearsal(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check(func)
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Operations in order, and what was in the memory that they wrote to."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._new: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check(func)
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._new and storage._cdata not in self._before:
                self._before[storage._cdata] = storage, storage.clone()
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in results:
            if tensor.untyped_storage()._cdata not in self._before:
                self._new[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        if torch.Tag.inplace_view not in func.tags:  # as it looks now: it may be transposed in place later
            again = tree_map(_alias, (args, kwargs, results))
            self.operations.append(lambda: _repeat(func, *again))
        return result

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _repeat(func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
    again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    for tensor, value in zip(results, again, strict=True):
        if tensor.untyped_storage()._cdata != value.untyped_storage()._cdata:
            tensor.copy_(value)


class Signal:
    """Given in a replay, and used up by whoever starts behind it."""

    def __init__(self, recorder: CpuRecorder) -> None:
        self._recorder, self.given = recorder, False

    def record(self) -> None:
        if (tape := self._recorder.tape) is not None:
            tape.operations.append(self._give)
        else:
            self._give()

    def _give(self) -> None:
        self.given = True

    @contextlib.contextmanager
    def after(self) -> Iterator[None]:
        assert self.given, "a sum would start before its gradients are there"
        self.given = False
        self._recorder.started_after_signals += 1
        yield


class CpuRecorder:
    """A :class:`~manyhands.training.torch.fast.recorder.CudaRecorder` of a CPU."""

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.recorded = 0
        self.replays = 0
        self.started_after_signals = 0

    def run_stream(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def rehearsal(self) -> Any:
        return Rehearsal()

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        tape = self.tape = Tape()
        try:
            with tape:
                work()
        except Exception as error:
            raise NotRecorded from error
        finally:
            self.tape = None
            tape.undo()
        self.recorded += 1
        return lambda: self._replay(tape)

    def _replay(self, tape: Tape) -> None:
        self.replays += 1
        with torch.no_grad():
            for operation in tape.operations:
                operation()

    def signal(self) -> Signal:
        return Signal(self)
