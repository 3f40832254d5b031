"""Records the operations that Python hands to MXNet's engine, as tasks, and combines them to one ``CachedOp``.

``y = mx.nd.dot(x, w); return y + 1`` gives two operations: ``dot`` takes the argument ``x`` and the array ``w`` from
outside, ``_plus_scalar`` takes the result of ``dot``. As a symbol that is ``_plus_scalar(dot(argument 0, outside 0))``.

Whatever else a call asks of MXNet's library (values, views, gradients, files, seeds) is not an operation, and a
CachedOp would not do it: its name is recorded, unless it is known to do nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import mxnet as mx
from mxnet.ndarray import register as _register

from manyhands.backends.mxnet import devices as adapter
from manyhands.backends.runtime import PLAIN_VALUES, Call, Outputs, Run, flatten, split_result, task
from manyhands.errors import CannotTrace
from manyhands.schedule.task import Task

# Calls of the library beside operations that do no harm: they read what never changes in an array, or wait.
_HARMLESS = {"MXImperativeInvokeEx", "MXNDArrayWaitToRead", "MXNDArrayWaitAll", "MXIsNumpyShape"}
_HARMLESS |= {"MXNDArrayGetContext", "MXNDArrayGetDType", "MXNDArrayGetShapeEx", "MXNDArrayGetShapeEx64"}
_HARMLESS |= {"MXNDArrayGetStorageType", "MXAutogradIsRecording", "MXAutogradIsTraining"}
_HARMLESS |= {"MXNDArrayCreateEx", "MXNDArrayCreateEx64"}  # the write into it is recorded later
# Why other calls cannot be recorded, by how their names begin.
_VIEW = "it reads or writes through a view (x.reshape(...), x[0:2], x[:] = ...)"
_WORDS = {
    "MXAutograd": "it uses autograd",
    "MXNDArraySyncCopyToCPU": "it reads values, which its operations may depend on",
    "MXNDArraySyncCopyFromCPU": "it copies values from NumPy or Python into an array",
    "MXNDArrayReshape": _VIEW,
    "MXNDArraySlice": _VIEW,
    "MXNDArrayAt": _VIEW,
    "MXInvokeCachedOp": "it calls a hybridized block, which is a CachedOp already",
}
_RANDOM = ("random", "sample", "shuffle", "uniform", "normal", "multinomial")


@dataclass
class _Operation:
    name: str
    handle: Any
    inputs: list[Any]
    outputs: list[Any]
    keys: Sequence[str]
    values: Sequence[Any]
    is_numpy: bool
    in_place: bool
    seconds: float


class Recording:
    """Records each operation that this thread hands to the engine, and waits for it; arrays are kept until the end.

    One at a time: MXNet's functions are replaced for all threads. A second one records nothing, and is not complete.
    """

    _recording = threading.Lock()

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self.beside: str | None = None  # the first call of the library that is not an operation
        self.result: Any = None
        self.complete = False

    def __enter__(self) -> Recording:
        self.complete = self._recording.acquire(blocking=False)
        if self.complete:
            mx.nd.waitall()
            self._thread = threading.get_ident()
            self._invoke, self._library = _register._imperative_invoke, type(mx.base._LIB)
            _register._imperative_invoke = self._record
            mx.base._LIB.__class__ = self._recording_library()
        return self

    def __exit__(self, *_: object) -> None:
        if self.complete:
            mx.base._LIB.__class__ = self._library
            _register._imperative_invoke = self._invoke
            self._recording.release()

    def _recording_library(self) -> type:
        recording = self

        def look_up(library: Any, name: str) -> Any:
            # What Python's garbage collector frees meanwhile is not part of the call.
            asked = name.startswith("MX") and "Free" not in name and name not in _HARMLESS
            if asked and threading.get_ident() == recording._thread:
                recording.beside = recording.beside or name
            return super(kind, library).__getattribute__(name)

        kind: Any = type("RecordingLibrary", (self._library,), {"__getattribute__": look_up})
        return kind  # type: ignore[no-any-return]

    def _record(
        self, handle: Any, inputs: Any, keys: Any, values: Any, out: Any, is_numpy: bool, gives_list: bool
    ) -> Any:
        if threading.get_ident() != self._thread:
            return self._invoke(handle, inputs, keys, values, out, is_numpy, gives_list)
        start = time.perf_counter()
        result = self._invoke(handle, inputs, keys, values, out, is_numpy, gives_list)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for array in results:
            array.wait_to_read()
        spent = time.perf_counter() - start
        name = sys._getframe(1).f_code.co_name  # MXNet makes a Python function for each operation
        self.operations.append(
            _Operation(name, handle, list(inputs), results, list(keys), list(values), is_numpy, out is not None, spent)
        )
        return result

    def must_be_all(self) -> None:
        """Raise if the call did more than was recorded."""
        if (name := self.beside) is not None:
            words = [text for start, text in _WORDS.items() if name.startswith(start)]
            raise CannotTrace(f"{words[0] if words else 'it does more than compute'} ({name})")


def tasks(recording: Recording) -> list[Task]:
    """Each array is a memory: views are not operations, so no two arrays share one."""
    return [
        task(
            operation.name,
            {id(array) for array in operation.inputs},
            {id(array) for array in operation.outputs},
            str(adapter.neutral(operation.outputs[0].ctx if operation.outputs else mx.current_context())),
            operation.seconds,
            copies=operation.name == "_copyto" and operation.inputs[0].ctx != operation.outputs[0].ctx,
        )
        for operation in recording.operations
    ]


def why_not_one(recording: Recording, modes: Sequence[Any]) -> str | None:
    """Why the recording cannot stand for other calls, or None."""
    if modes[0] or modes[1]:
        return "under autograd.record() MXNet records operations itself, for backward()"
    contexts = {
        str(array.ctx) for operation in recording.operations for array in [*operation.inputs, *operation.outputs]
    }
    if len(contexts) > 1:
        return f"it computes on one context, and this function uses {', '.join(sorted(contexts))}"
    for operation in recording.operations:
        if operation.in_place or not operation.outputs:
            return f"{operation.name} writes in place"
        if operation.name == "Custom":
            return "it has its own operator (mx.operator), which runs Python"
        always = operation.name == "Dropout" and "always" in map(str, operation.values)
        if always or any(word in operation.name.lower() for word in _RANDOM):
            return f"{operation.name} draws random numbers"
    return None


def one_operation(call: Call, recording: Recording, reached: Set[int]) -> Run:
    """The recording as a CachedOp of the call's arrays and of arrays from outside, which are read in place."""
    symbols: dict[int, Any] = {}
    sources: dict[str, Any] = {}  # by the variable's name: an argument's number, or an array from outside
    for number, tensor in enumerate(call.tensors):
        symbols[id(tensor)] = _variable(f"argument{number}", tensor)
        sources[f"argument{number}"] = number
    for place, operation in enumerate(recording.operations):
        for array in operation.inputs:
            if id(array) not in symbols:
                if id(array) not in reached:
                    raise CannotTrace(f"{operation.name} uses an array that no recorded operation has computed")
                label = f"outside{len(sources)}"
                symbols[id(array)], sources[label] = _variable(label, array), array
        inputs = [symbols[id(array)] for array in operation.inputs]
        symbol = _composed(operation, inputs, f"op{place}")
        # BatchNorm writes its statistics in training alone, which has been refused.
        if "BatchNorm" not in operation.name and _written(symbol) - set().union(*map(_written, inputs)):
            raise CannotTrace(f"{operation.name} writes in place")
        parts = list(symbol) if len(operation.outputs) > 1 or isinstance(symbol, list) else [symbol]
        symbols.update({id(array): part for array, part in zip(operation.outputs, parts, strict=False)})
    computed, outputs = split_result(
        flatten(recording.result), call.tensors, lambda leaf: symbols.get(id(leaf)), PLAIN_VALUES
    )
    return _run(computed, outputs, sources)


def _composed(operation: _Operation, inputs: list[Any], name: str) -> Any:
    def compose(keys: Sequence[str], values: Sequence[Any]) -> Any:
        return mx.symbol.register._symbol_creator(
            operation.handle, inputs, None, keys, values, name, operation.is_numpy
        )

    try:
        return compose(operation.keys, operation.values)
    except mx.MXNetError as error:
        # An operation on arrays counts its inputs itself; a symbol needs the number.
        if "num_args" not in str(error):
            raise
        return compose([*operation.keys, "num_args"], [*operation.values, len(inputs)])


def _written(symbol: Any) -> set[str]:
    return set() if isinstance(symbol, list) else set(symbol.list_auxiliary_states())


def _variable(name: str, array: Any) -> Any:
    variable = mx.sym.var(name)
    return variable.as_np_ndarray() if isinstance(array, mx.np.ndarray) else variable


def _run(computed: list[Any], outputs: Outputs, sources: dict[str, Any]) -> Run:
    if not computed:
        raise CannotTrace("it returns nothing that it computes")
    if len(kinds := set(map(type, computed))) > 1:
        raise CannotTrace("it returns arrays of mx.nd and of mx.np together")
    whole = mx.sym.Group(computed, create_fn=kinds.pop())
    cached = mx.nd.CachedOp(whole)
    wanted = [sources[word] for word in whole.list_inputs()]

    def run(tensors: Sequence[Any]) -> Any:
        results = cached(*[tensors[source] if isinstance(source, int) else source for source in wanted])
        return outputs.rebuild([results] if isinstance(results, mx.nd.NDArray) else results, tensors)

    return run
