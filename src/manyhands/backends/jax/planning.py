"""JAX as a :class:`~manyhands.backends.runtime.Runtime`: jaxprs as graphs, ``jax.jit`` as the way to run them.

A function is traced once, into a jaxpr. That jaxpr runs under ``jax.jit``, with the arrays that the function reads from
outside as additional arguments. So Python code is not run again without the caller's knowledge, and large weights are
not compiled in as constants.

``jax.jit`` computes on one device and ignores ``device_put`` to another. So a function over several devices is run as
written, and JAX's asynchronous dispatch lets the devices work at the same time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from manyhands import machine, tree
from manyhands.addresses import Held
from manyhands.backends.jax import devices as adapter
from manyhands.backends.jax import tasks as tasks
from manyhands.backends.jax.graph import Graph
from manyhands.backends.runtime import PLAIN_VALUES, Call, Flat, Outputs, Traced, Tracer, split_result
from manyhands.errors import CannotTrace, first_line

name = "jax"
WAY = "jax.jit"
BATCH = "jax.vmap over stacked arrays makes them one operation"
LANES = "XLA decides which operations are fused, and their order"
PROFILER = "JAX does not report when each operation ran; use jax.profiler.trace(folder)"
BY_VALUE: tuple[type, ...] = PLAIN_VALUES


def version_of(value: Any) -> Any:
    """A Flax variable is traced as its current value, a module with its current attributes."""
    if tasks.is_nnx(value) and not tasks.is_variable(value):
        return Held([*(tasks.parts_of(value) or ())])
    return tasks.version_of(value)


def is_tracing(leaves: Sequence[Any]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def flatten(value: Any) -> Flat:
    """By our trees, which keep the order of dicts; what is registered with JAX alone is taken apart by JAX."""
    outer, structure = tree.flatten(value)
    if all(isinstance(leaf, (jax.Array, *BY_VALUE)) for leaf in outer):
        return outer, structure.unflatten, structure
    inner = [jax.tree.flatten(leaf, is_leaf=tasks.is_nnx) for leaf in outer]

    def unflatten(values: list[Any]) -> Any:
        left = iter(values)
        parts = [jax.tree.unflatten(treedef, [next(left) for _ in range(treedef.num_leaves)]) for _, treedef in inner]
        return structure.unflatten(parts)

    leaves = [leaf for part, _ in inner for leaf in part]
    return leaves, unflatten, (structure, tuple(treedef for _, treedef in inner))


def form(leaf: Any) -> Hashable | None:
    return (leaf.aval, leaf.sharding, leaf.committed) if isinstance(leaf, jax.Array) else None


def modes() -> Hashable:
    config = jax.config
    return (
        config.jax_enable_x64,
        config.jax_default_device,
        config.jax_default_matmul_precision,
        config.jax_disable_jit,
        config.jax_numpy_dtype_promotion,
    )


def observe(call: Call) -> tuple[Any, Tracer]:
    return wait(call.plainly()), lambda reached: trace(call)


def wait(result: Any) -> Any:
    return jax.block_until_ready(result)


def variables(reached: Sequence[Any]) -> list[tuple[Any, Any]]:
    return []


def with_values(values: Sequence[tuple[Any, Any]]) -> AbstractContextManager[None]:
    return nullcontext()


def numbers(leaf: Any) -> Any:
    return np.asarray(adapter.without_key(leaf)) if isinstance(leaf, jax.Array) else None


def kind(leaf: Any) -> Any:
    return leaf.aval, leaf.sharding.device_set


def lanes(device: str) -> int:
    """On the CPU, XLA's threads run independent operations at the same time."""
    return 1 if device.startswith("gpu") else machine.usable_cores()


def trace(call: Call) -> Traced:
    if jax.config.jax_disable_jit:
        raise CannotTrace("jax.jit is switched off (jax_disable_jit)")
    outputs: list[Outputs] = []

    def flat(*tensors: Any) -> list[Any]:
        arguments, keywords = call.rebuild(tensors)
        result = flatten(call.function(*arguments, **keywords))
        computed, how = split_result(result, tensors, _tracer, (*BY_VALUE, jax.Array))
        outputs.append(how)
        return computed

    try:
        closed = jax.make_jaxpr(flat)(*call.tensors)
    except CannotTrace:
        raise
    except Exception as error:
        raise CannotTrace(f"jax.jit cannot trace it: {first_line(error)}") from error
    graph = Graph(call.tensors, closed)
    traced = Traced(graph.tasks, forms=graph.forms)
    if closed.effects:
        traced.notes.append(
            "jax.jit is not used: the function prints or calls back to the host, and a trial would repeat that"
        )
    elif len(graph.devices) > 1:
        traced.notes.append(
            f"jax.jit is not used: it computes on one device, and this function uses {', '.join(sorted(graph.devices))}"
        )
    else:
        traced.run = _run(closed, outputs[-1])
    return traced


def _tracer(leaf: Any) -> Any | None:
    return leaf if isinstance(leaf, jax.core.Tracer) else None


def _run(closed: Any, outputs: Outputs) -> Any:
    jaxpr, constants = closed.jaxpr, list(closed.consts)
    compiled = jax.jit(lambda constants, tensors: jax.core.eval_jaxpr(jaxpr, constants, *tensors))
    return lambda tensors: outputs.rebuild(compiled(constants, tensors), tensors)
