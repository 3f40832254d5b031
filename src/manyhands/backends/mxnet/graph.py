"""Operations of MXNet, noted as Python hands them to the engine: as tasks, and put together to one ``CachedOp``.

The arrays of the noted operations are kept until the function has been planned, so that no address comes twice: an
array that nobody has seen coming (a view, made in C) is known by the memory that it lies in.

``y = mx.nd.dot(x, w); return y + 1`` gives two operations: ``dot`` takes the argument ``x`` and the array ``w`` from
outside, ``_plus_scalar`` takes what ``dot`` gave. As a symbol that is ``_plus_scalar(dot(argument 0, outside 0))``.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import register as _register

from manyhands import tree
from manyhands.backends.mxnet import devices as adapter
from manyhands.backends.traced import Call, Outputs, task
from manyhands.errors import CannotTrace
from manyhands.schedule.task import Task

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))
# What Python asks of MXNet's library beside operations, by the name there: none of it would be done by a CachedOp.
_BESIDE = {
    "MXAutogradSetIsRecording": "it uses autograd.record(), and gradients would not flow",
    "MXAutogradSetIsTraining": "it uses autograd's train_mode(), in which layers keep statistics",
    "MXAutogradMarkVariables": "it attaches gradients to arrays",
    "MXAutogradBackwardEx": "it runs a backward pass, which writes gradients",
    "MXCustomFunctionRecord": "it has a gradient of its own (autograd.Function)",
    "MXNDArraySyncCopyFromCPU": "it copies values from NumPy or Python into an array",
    "MXNDArraySyncCopyFromNDArray": "it copies parts of a sparse array",
    "MXNDArraySave": "it writes a file (mx.nd.save)",
    "MXNDArrayToDLPack": "it gives an array's memory away (to_dlpack)",
    "MXRandomSeed": "it seeds MXNet's random numbers",
    "MXRandomSeedContext": "it seeds MXNet's random numbers",
    "MXKVStoreInitEx": "it uses a key-value store",
    "MXKVStorePushEx": "it uses a key-value store",
    "MXKVStorePullEx": "it uses a key-value store",
    "MXKVStorePushPullEx": "it uses a key-value store",
    "MXKVStoreBroadcastEx": "it uses a key-value store",
}
_SWITCHES = ("MXAutogradSetIsRecording", "MXAutogradSetIsTraining")  # switching them off does nothing
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
    gives_list: bool
    in_place: bool
    seconds: float


class Recording:
    """Notes each operation that this thread hands to the engine, and waits for it.

    One at a time: MXNet's functions are replaced for all threads. A second one notes nothing, and says so.
    """

    _one = threading.Lock()

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self.reads = False  # whether Python looked at values
        self.beside: str | None = None  # what it did beside operations
        self.result: Any = None
        self.complete = False

    def __enter__(self) -> Recording:
        self.complete = self._one.acquire(blocking=False)
        if not self.complete:
            return self
        self._thread = threading.get_ident()
        self._invoke, self._read = _register._imperative_invoke, mx.nd.NDArray.asnumpy
        recording, read = self, self._read

        def asnumpy(array: Any) -> Any:
            recording.reads = recording.reads or threading.get_ident() == recording._thread
            return read(array)

        mx.nd.waitall()
        _register._imperative_invoke = self._noting
        mx.nd.NDArray.asnumpy = asnumpy
        self._library = {name: getattr(mx.base._LIB, name) for name in _BESIDE if hasattr(mx.base._LIB, name)}
        for name, function in self._library.items():
            setattr(mx.base._LIB, name, self._noting_beside(name, function))
        return self

    def __exit__(self, *_: object) -> None:
        if not self.complete:
            return
        for name, function in self._library.items():
            setattr(mx.base._LIB, name, function)
        _register._imperative_invoke = self._invoke
        mx.nd.NDArray.asnumpy = self._read
        self._one.release()

    def _noting_beside(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            off = name in _SWITCHES and not arguments[0].value
            if self.beside is None and not off and threading.get_ident() == self._thread:
                self.beside = _BESIDE[name]
            return function(*arguments)

        return noting

    def _noting(
        self, handle: Any, inputs: Any, keys: Any, values: Any, out: Any, is_numpy: bool, gives_list: bool
    ) -> Any:
        if threading.get_ident() != self._thread:
            return self._invoke(handle, inputs, keys, values, out, is_numpy, gives_list)
        start = time.perf_counter()
        result = self._invoke(handle, inputs, keys, values, out, is_numpy, gives_list)
        made = list(result) if isinstance(result, (list, tuple)) else [result]
        for one in made:
            one.wait_to_read()
        spent = time.perf_counter() - start
        what = sys._getframe(1).f_code.co_name  # MXNet makes a Python function for each operation
        self.operations.append(
            _Operation(
                what, handle, list(inputs), made, list(keys), list(values), is_numpy, gives_list, out is not None, spent
            )
        )
        return result


# As tasks


def tasks(recording: Recording) -> list[Task]:
    memories = _Memories()
    return [
        task(
            one.name,
            {memories.of(array) for array in one.inputs},
            {memories.of(array) for array in one.outputs},
            str(adapter.neutral(one.outputs[0].ctx if one.outputs else mx.current_context())),
            one.seconds,
            copies=one.name == "_copyto" and one.inputs[0].ctx != one.outputs[0].ctx,
        )
        for one in recording.operations
    ]


class _Memories:
    """A number for each memory; arrays that share one have the same."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._places: list[tuple[int, int, int]] = []  # where it begins, where it ends, its number

    def of(self, array: Any) -> int:
        if id(array) not in self._numbers:
            self._numbers[id(array)] = self._found(array)
        return self._numbers[id(array)]

    def _found(self, array: Any) -> int:
        number = len(self._numbers)
        if array.stype != "default" or not array.size:
            return number
        array.wait_to_read()
        pointer = ctypes.c_void_p()
        mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
        begin = pointer.value or 0
        end = begin + array.size * np.dtype(array.dtype).itemsize
        number = next((n for start, stop, n in self._places if start < end and begin < stop), number)
        self._places.append((begin, end, number))
        return number


# As one operation


def why_not_one(recording: Recording, modes: Sequence[Any]) -> str | None:
    """Why what was noted cannot stand for other calls, or None."""
    if modes[0] or modes[1]:
        return "under autograd.record() MXNet notes operations itself, for backward()"
    if recording.beside is not None:
        return recording.beside
    contexts = {str(array.ctx) for one in recording.operations for array in [*one.inputs, *one.outputs]}
    if len(contexts) > 1:
        return f"it computes on one context, and this function uses {', '.join(sorted(contexts))}"
    if recording.reads:
        return "it reads values, and what it does may depend on them"
    for one in recording.operations:
        if one.in_place or not one.outputs:
            return f"{one.name} writes in place"
        if one.name == "Custom":
            return "it has an operator of its own (mx.operator), which runs Python"
        always = one.name == "Dropout" and "always" in map(str, one.values)
        if always or any(word in one.name.lower() for word in _RANDOM):
            return f"{one.name} draws random numbers"
    return None


def one_operation(call: Call, recording: Recording, is_outside: Callable[[Any], bool]) -> Callable[[Call], Any]:
    """What was noted as a CachedOp of the call's arrays and of those from outside, which are read where they are."""
    symbols: dict[int, Any] = {}
    given: dict[str, Any] = {}  # by the variable's name: an argument's number, or an array from outside
    for number, tensor in enumerate(call.tensors):
        symbols[id(tensor)] = _variable(f"argument{number}", tensor)
        given[f"argument{number}"] = number
    for place, one in enumerate(recording.operations):
        for array in one.inputs:
            if id(array) not in symbols:
                if not is_outside(array):
                    raise CannotTrace(f"{one.name} takes an array that came about in a way that MXNet does not show")
                label = f"outside{len(given)}"
                symbols[id(array)], given[label] = _variable(label, array), array
        inputs = [symbols[id(array)] for array in one.inputs]
        made = _composed(one, inputs, f"op{place}")
        # BatchNorm writes its statistics in training alone, which has been refused.
        if "BatchNorm" not in one.name and _written(made) - set().union(*map(_written, inputs)):
            raise CannotTrace(f"{one.name} writes in place")
        parts = list(made) if len(one.outputs) > 1 or isinstance(made, list) else [made]
        symbols.update({id(array): part for array, part in zip(one.outputs, parts, strict=False)})
    computed, outputs = _taken_apart(recording.result, call.tensors, symbols)
    return _runner(computed, outputs, given)


def _composed(one: _Operation, inputs: list[Any], name: str) -> Any:
    def compose(keys: Sequence[str], values: Sequence[Any]) -> Any:
        return mx.symbol.register._symbol_creator(one.handle, inputs, None, keys, values, name, one.is_numpy)

    try:
        return compose(one.keys, one.values)
    except mx.MXNetError as error:
        # An operation on arrays counts its inputs itself; a symbol has to be told.
        if "num_args" not in str(error):
            raise
        return compose([*one.keys, "num_args"], [*one.values, len(inputs)])


def _written(symbol: Any) -> set[str]:
    return set() if isinstance(symbol, list) else set(symbol.list_auxiliary_states())


def _variable(name: str, array: Any) -> Any:
    made = mx.sym.var(name)
    return made.as_np_ndarray() if isinstance(array, mx.np.ndarray) else made


def _taken_apart(result: Any, tensors: Sequence[Any], symbols: dict[int, Any]) -> tuple[list[Any], Outputs]:
    leaves, structure = tree.flatten(result)
    places = {id(tensor): number for number, tensor in enumerate(tensors)}
    computed: list[Any] = []
    kinds: list[tuple[str, Any]] = []
    for leaf in leaves:
        if id(leaf) in places:
            kinds.append(("argument", places[id(leaf)]))
        elif isinstance(leaf, _BY_VALUE):
            kinds.append(("value", leaf))
        elif isinstance(leaf, mx.nd.NDArray) and id(leaf) in symbols:
            computed.append(symbols[id(leaf)])
            kinds.append(("computed", None))
        else:
            raise CannotTrace(f"a result ({type(leaf).__name__}) came about in a way that MXNet does not show")
    return computed, Outputs(structure.unflatten, kinds)


def _runner(computed: list[Any], outputs: Outputs, given: dict[str, Any]) -> Callable[[Call], Any]:
    if not computed:
        raise CannotTrace("it computes nothing that it gives back")
    if len(kinds := set(map(type, computed))) > 1:
        raise CannotTrace("it gives back arrays of mx.nd and of mx.np")
    whole = mx.sym.Group(computed, create_fn=kinds.pop())
    run = mx.nd.CachedOp(whole)
    wanted = [given[word] for word in whole.list_inputs()]

    def one_call(call: Call) -> Any:
        made = run(*[call.tensors[one] if isinstance(one, int) else one for one in wanted])
        return outputs.put_together([made] if isinstance(made, mx.nd.NDArray) else made, call.tensors)

    return one_call
