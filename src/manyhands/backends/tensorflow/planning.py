"""What :mod:`manyhands.parallel.delegated` needs of TensorFlow: ``tf.function`` as graph and as the way to run.

A function is traced once, without AutoGraph: a branch on a tensor's value is not rewritten, but left to plain
execution. TensorFlow's runtime runs independent operations of the graph on its inter-op threads. Variables take part by
reference: what a function assigns is assigned, and put back after a trial.

Stateful random numbers (``tf.random.normal``) come in another order in a graph than operation by operation, so such a
function stays as it is; ``tf.random.stateless_*`` and Keras's seed generators give the same numbers in both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import record as _record
from tensorflow.python.framework import op_def_registry

from manyhands import machine, tree
from manyhands.addresses import Held
from manyhands.backends.tensorflow import devices as adapter
from manyhands.backends.tensorflow.graph import ASSIGNS, Graph
from manyhands.backends.traced import Call, Outputs, Same, Traced, compared, content_of, refuse_unknown, told
from manyhands.errors import CannotTrace

name = "tensorflow"
PLAINLY = "TensorFlow runs operations one by one"
BATCH = "tf.linalg.matmul of stacked matrices (tf.stack), or tf.vectorized_map, makes them one operation"
LANES = "TensorFlow's optimizer may fuse operations, and its inter-op threads take whatever is ready"
PROFILER = "TensorFlow does not tell when it ran which operation; tf.profiler.experimental writes what it knows"
_EAGER = tf.__internal__.EagerTensor
_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), range, slice, type, tf.DType, tf.TensorShape)
# Operations with state that a trial can put back, or that change nothing.
_HARMLESS = ("ReadVariableOp", "VarHandleOp", "VariableShape", "PartitionedCall", "Assert", "If", "While", "Case")


# Calls


def call(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call | None:
    """The call by which calls like it are known; None where TensorFlow is tracing."""
    if not tf.executing_eagerly():
        return None
    leaves, structure = tree.flatten((arguments, keywords))
    tensors: list[Any] = []
    others: list[Any] = []
    known: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, _EAGER):
            tensors.append(leaf)
            known.append((tuple(leaf.shape), leaf.dtype, leaf.device))
        else:
            others.append(leaf)
            known.append((type(leaf), repr(leaf)) if isinstance(leaf, _BY_VALUE) else Same(leaf))

    def rebuild(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = iter(values)
        return structure.unflatten(next(given) if isinstance(leaf, _EAGER) else leaf for leaf in leaves)  # type: ignore[return-value]

    return Call(arguments, keywords, tensors, others, (structure, tuple(known), _scope()), rebuild)


def _scope() -> str:
    """The device of ``with tf.device(...)`` around the call, or nothing."""
    return str(_context.context().device_name or "")


def parts(value: Any) -> Iterable[tuple[str, Callable[[], Any]]] | None:
    """Tensors never change, and variables are read when the graph is run."""
    if isinstance(value, (tf.Tensor, tf.Variable)) or adapter._is_keras(value, "Variable"):
        return ()
    if isinstance(value, np.ndarray):
        return content_of(value)
    if adapter._is_keras(value, "Layer"):
        return _of_layer(value)
    return None


def _of_layer(layer: Any) -> list[tuple[str, Callable[[], Any]]]:
    """Its settings, its variables and the layers in it; not Keras's own bookkeeping, which changes as it likes."""
    own = vars(layer)
    words = [word for word in own if not word.startswith("_") and word not in ("built", "losses")]
    found: list[tuple[str, Callable[[], Any]]] = [(word, functools.partial(own.get, word)) for word in words]
    found += [(word, functools.partial(getattr, layer, word)) for word in ("trainable", "built")]
    return [*found, ("layers", lambda: list(layer._flatten_layers(include_self=False, recursive=False)))]


# Running


def observe(function: Callable[..., Any], one: Call) -> tuple[Any, None]:
    """Plain execution to its end; nothing is seen of it."""
    return wait(function(*one.arguments, **one.keywords)), None


def wait(result: Any) -> Any:
    adapter.synchronize(None)
    return result


@contextmanager
def untouched(traced: Traced) -> Iterator[Callable[[], None]]:
    """Trying a function out leaves no trace: variables are put back, and a tape around the call notes nothing.

    Gives what puts them back already before the end: a function that goes on from where it stands must not be tried
    beyond its data.
    """
    with _record.stop_recording():
        saved = [(variable, _copy(variable)) for variable in traced.writes]

        def put_back() -> None:
            for variable, before in saved:
                variable.assign(before)

        try:
            yield put_back
        finally:
            put_back()


def _copy(variable: Any) -> Any:
    return adapter.copy(variable, adapter.device_of(variable))


def outcome(result: Any, traced: Traced) -> list[Any]:
    """The results, and what is then in the variables that it may write to."""
    return [*tree.flatten(result)[0], *map(_copy, traced.writes)]


def equal(ones: Sequence[Any], others: Sequence[Any]) -> tuple[bool, float]:
    return compared(ones, others, _numbers, lambda x: (x.dtype, x.device))


def _numbers(value: Any) -> Any:
    return value.numpy() if isinstance(value, _EAGER) else None


def lanes(device: str) -> int:
    """How many operations run at once: TensorFlow's inter-op threads; a GPU has one queue."""
    if device.startswith("gpu"):
        return 1
    return tf.config.threading.get_inter_op_parallelism_threads() or machine.usable_cores()


# Tracing


def trace(function: Callable[..., Any], one: Call, outside: Any, seen: None) -> Traced:
    refuse_unknown(one.others, lambda value: isinstance(value, _BY_VALUE) or outside.watches(value))
    shapes: list[Outputs] = []

    def flat(*tensors: Any) -> list[Any]:
        arguments, keywords = one.rebuild(tensors)
        computed, outputs = _taken_apart(function(*arguments, **keywords), tensors)
        shapes.append(outputs)
        return computed

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in one.tensors]
    try:
        concrete = tf.function(flat, autograph=False).get_concrete_function(*specs)
    except CannotTrace:
        raise
    except Exception as error:
        raise CannotTrace(f"tf.function cannot trace it: {told(error)}") from error
    graph = Graph(concrete, _scope())
    traced = Traced(graph.tasks, "tf.function", None, forms=graph.forms)
    kinds = _operations(concrete)
    strange = sorted(kind for kind in kinds if _is_stateful(kind) and not _is_harmless(kind))
    if strange:
        what = "random numbers come in another order there" if any("Random" in kind for kind in strange) else "effects"
        traced.notes.append(f"tf.function is not used: its graph has {', '.join(strange)} ({what})")
        return traced
    if any(kind.startswith(ASSIGNS) for kind in kinds):
        traced.writes = concrete.graph.variables
    traced.compiled = _compiled(concrete, shapes[-1])
    return traced


def _taken_apart(result: Any, tensors: Sequence[Any]) -> tuple[list[Any], Outputs]:
    leaves, structure = tree.flatten(result)
    places = {id(tensor): number for number, tensor in enumerate(tensors)}
    computed: list[Any] = []
    kinds: list[tuple[str, Any]] = []
    for leaf in leaves:
        if id(leaf) in places:
            kinds.append(("argument", places[id(leaf)]))
        elif isinstance(leaf, tf.Tensor) and tf.is_symbolic_tensor(leaf):
            computed.append(leaf)
            kinds.append(("computed", None))
        elif isinstance(leaf, (*_BY_VALUE, tf.Tensor, tf.Variable)):
            kinds.append(("value", leaf))
        else:
            raise CannotTrace(f"a result is a {type(leaf).__name__}: tf.function would give the same one at every call")
    return computed, Outputs(structure.unflatten, kinds)


def _compiled(concrete: Any, outputs: Outputs) -> Callable[[Call], Any]:
    def compiled(one: Call) -> Any:
        return outputs.put_together(concrete(*one.tensors) or (), one.tensors)

    return compiled


def _operations(concrete: Any) -> set[str]:
    """The kinds of operations of a graph and of the functions that it calls."""
    found = concrete.graph.as_graph_def()
    inner = {node.op for function in found.library.function for node in function.node_def}
    return {node.op for node in found.node} | inner


def _is_stateful(kind: str) -> bool:
    known = op_def_registry.get(kind)
    return known is None or bool(known.is_stateful)


def _is_harmless(kind: str) -> bool:
    return kind.removeprefix("Stateful") in _HARMLESS or kind.startswith(ASSIGNS)


# What explicit tasks need of TensorFlow (manyhands.tasks.scope)


def memory_of(value: Any) -> int:
    """Tensors never change; a variable is known by the resource behind it, a Keras variable by the one in it."""
    variable = _variable(value)
    return id(value if variable is None else variable.handle)


def _variable(value: Any) -> Any:
    """The variable that it is, None if it is none; one that is mirrored on several devices consists of several."""
    if adapter._is_keras(value, "Variable"):
        value = value.value
    is_one = isinstance(value, tf.Variable) and not isinstance(value, tf.distribute.DistributedValues)
    return value if is_one else None


def parts_of(value: Any) -> Sequence[Any] | None:
    """What is read and written with an object.

    A module or a layer has its variables and attributes and those of the layers in it; an optimizer the weights that it
    moves and its notes about them; a metric its counts; a ``tf.function`` the function that it was made of.
    """
    if isinstance(value, tf.Tensor) or _variable(value) is not None:
        return ()
    if isinstance(value, tf.distribute.DistributedValues):
        return value.values  # type: ignore[no-any-return]
    if adapter._is_keras(value, "Variable"):
        return (value.value,)
    if isinstance(value, tf.types.experimental.PolymorphicFunction):
        return (value.python_function,)
    if isinstance(value, tf.types.experimental.ConcreteFunction):
        return value.variables  # type: ignore[no-any-return]
    if adapter._is_keras(value, "Optimizer"):
        return [*value.variables, *value._trainable_variables]
    if adapter._is_keras(value, "Metric"):
        return [*value.variables]
    layers = _layers(value)
    return [*value.variables, *(part for layer in layers for part in _attributes(layer))] if layers else None


def _layers(value: Any) -> list[Any]:
    """A module or layer, and those in it; nothing for anything else."""
    if adapter._is_keras(value, "Layer"):
        return [*value._flatten_layers()]
    return [value, *value.submodules] if isinstance(value, tf.Module) else []


def _attributes(layer: Any) -> list[Any]:
    """What a layer of the user's holds besides."""
    if type(layer).__module__.partition(".")[0] in ("keras", "tensorflow"):
        return []
    return [one for name, one in vars(layer).items() if not name.startswith("_")]


def version_of(value: Any) -> Any:
    """A variable is the value that it holds, a module or a layer the variables and attributes that it has."""
    if (variable := _variable(value)) is not None:
        return _Value(variable)
    return Held([*(parts_of(value) or ())]) if _layers(value) else None


class _Value:
    """The value of a variable. While it is kept nobody overwrites it: an assignment puts the new one elsewhere.

    So it is enough to look where the next one lies. Only where TensorFlow has made a copy to read from (after the first
    sparse update, or on a GPU) contents are compared.
    """

    __slots__ = ("_tensor",)

    def __init__(self, variable: tf.Variable) -> None:
        with _record.stop_recording():
            self._tensor = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value):
            return False
        place = self._place()
        return (place is not None and place == other._place()) or self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]

    def _place(self) -> int | None:
        try:
            return int(np.asarray(memoryview(self._tensor)).__array_interface__["data"][0])
        except (TypeError, ValueError, BufferError):  # a kind of numbers that Python has no name for
            return None

    def _content(self) -> Any:
        content = np.asarray(self._tensor.numpy())
        return content.shape, content.tolist() if content.dtype.hasobject else content.tobytes()


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """``with tf.device(...)`` is a thread's own: the task's thread does as the one that gave it."""
    scope = _scope()

    def run(*arguments: Any, **keywords: Any) -> Any:
        with tf.device(scope or None):
            return function(*arguments, **keywords)

    return run
