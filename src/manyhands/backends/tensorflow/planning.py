"""TensorFlow as a :class:`~manyhands.backends.runtime.Runtime`: ``tf.function`` as graph and as the way to run.

A function is traced once, without AutoGraph: a branch on a tensor's value is not rewritten, but left to plain
execution. TensorFlow's runtime runs independent operations of the graph on its inter-op threads. Variables take part by
reference: what a function assigns is assigned, and put back after a trial.

Stateful random numbers (``tf.random.normal``) come in another order in a graph than operation by operation, so such a
function stays as it is; ``tf.random.stateless_*`` and Keras's seed generators give the same numbers in both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record as _record
from tensorflow.python.framework import op_def_registry

from manyhands import machine
from manyhands.addresses import Held
from manyhands.backends.runtime import PLAIN_VALUES, Call, Outputs, Traced, Tracer, split_result
from manyhands.backends.runtime import flatten as flatten
from manyhands.backends.tensorflow import devices as adapter
from manyhands.backends.tensorflow import tasks as tasks
from manyhands.backends.tensorflow.graph import ASSIGNS, Graph
from manyhands.errors import CannotTrace, first_line

name = "tensorflow"
WAY = "tf.function"
BATCH = "tf.linalg.matmul of stacked matrices (tf.stack), or tf.vectorized_map, makes them one operation"
LANES = "TensorFlow's optimizer may fuse operations, and its inter-op threads take whatever is ready"
PROFILER = "TensorFlow does not report when each operation ran; use tf.profiler.experimental"
BY_VALUE: tuple[type, ...] = (*PLAIN_VALUES, tf.DType, tf.TensorShape)
_EAGER = tf.__internal__.EagerTensor
# Operations with state that a trial can put back, or that change nothing.
_HARMLESS = ("ReadVariableOp", "VarHandleOp", "VariableShape", "PartitionedCall", "Assert", "If", "While", "Case")


def is_tracing(leaves: Sequence[Any]) -> bool:
    return not tf.executing_eagerly()


def form(leaf: Any) -> Hashable | None:
    return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, _EAGER) else None


def modes() -> Hashable:
    return tasks.scope()


def version_of(value: Any) -> Any:
    """Variables are read when the graph is run; a module or a layer is traced with its current attributes."""
    layers = tasks.layers_of(value)
    parts = [part for layer in layers for name, part in vars(layer).items() if not name.startswith("_")]
    return (
        Held([*value.variables, *parts, *(getattr(layer, "trainable", None) for layer in layers)]) if layers else None
    )


def observe(call: Call) -> tuple[Any, Tracer]:
    return wait(call.plainly()), lambda reached: trace(call)


def wait(result: Any) -> Any:
    adapter.synchronize(None)
    return result


def variables(reached: Sequence[Any]) -> list[tuple[Any, Any]]:
    with _record.stop_recording():
        by_id = {id(variable): variable for variable in map(tasks.variable_of, reached) if variable is not None}
        return [(variable, variable.read_value()) for variable in by_id.values()]


@contextmanager
def with_values(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    with _record.stop_recording():
        after = variables([variable for variable, _ in values])
        try:
            for variable, value in values:
                variable.assign(value)
            yield
        finally:
            for variable, value in after:
                variable.assign(value)


def numbers(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, _EAGER) else None


def kind(leaf: Any) -> Any:
    return leaf.dtype, leaf.device


def lanes(device: str) -> int:
    """TensorFlow's inter-op threads; a GPU has one queue."""
    if device.startswith("gpu"):
        return 1
    return tf.config.threading.get_inter_op_parallelism_threads() or machine.usable_cores()


def trace(call: Call) -> Traced:
    outputs: list[Outputs] = []

    def flat(*tensors: Any) -> list[Any]:
        arguments, keywords = call.rebuild(tensors)
        result = flatten(call.function(*arguments, **keywords))
        computed, output = split_result(result, tensors, _symbolic, (*BY_VALUE, tf.Tensor, tf.Variable))
        outputs.append(output)
        return computed

    tensors: list[Any] = call.tensors
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    try:
        concrete = tf.function(flat, autograph=False).get_concrete_function(*specs)
    except CannotTrace:
        raise
    except Exception as error:
        raise CannotTrace(f"tf.function cannot trace it: {first_line(error)}") from error
    graph = Graph(concrete, tasks.scope())
    traced = Traced(graph.tasks, forms=graph.forms)
    kinds = _operations(concrete)
    strange = sorted(kind for kind in kinds if _is_stateful(kind) and not _is_harmless(kind))
    if strange:
        reason = (
            "random numbers would come in a different order" if any("Random" in kind for kind in strange) else "effects"
        )
        traced.notes.append(f"tf.function is not used: its graph has {', '.join(strange)} ({reason})")
        return traced
    if any(kind.startswith(ASSIGNS) for kind in kinds):
        traced.writes = concrete.graph.variables
    traced.run = _run(concrete, outputs[-1])
    return traced


def _symbolic(leaf: Any) -> Any | None:
    return leaf if isinstance(leaf, tf.Tensor) and tf.is_symbolic_tensor(leaf) else None


def _run(concrete: Any, outputs: Outputs) -> Any:
    return lambda tensors: outputs.rebuild(concrete(*tensors) or (), tensors)


def _operations(concrete: Any) -> set[str]:
    """The kinds of operations of a graph and of the functions that it calls."""
    definition = concrete.graph.as_graph_def()
    inner = {node.op for function in definition.library.function for node in function.node_def}
    return {node.op for node in definition.node} | inner


def _is_stateful(kind: str) -> bool:
    known = op_def_registry.get(kind)
    return known is None or bool(known.is_stateful)


def _is_harmless(kind: str) -> bool:
    return kind.removeprefix("Stateful") in _HARMLESS or kind.startswith(ASSIGNS)
