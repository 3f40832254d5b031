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
BY_VALUE: tuple[type, ...] = (*PLAIN_VALUES, type(jax.tree.structure(0)))
# What decides how a function is traced, or which random numbers it draws.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_disable_jit",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_debug_nans",
    "jax_debug_infs",
)


def version_of(value: Any) -> Any:
    """A Flax variable is traced as its current value, a module with its current attributes."""
    if tasks.is_module(value):
        return Held([*(tasks.parts_of(value) or ())])
    return tasks.version_of(value)


def is_tracing(leaves: Sequence[Any]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def flatten(value: Any) -> Flat:
    """By our trees, which keep the order of dicts; what is registered with JAX is taken apart by JAX."""
    outer, structure = tree.flatten(value, _is_by_jax)
    if all(isinstance(leaf, (jax.Array, *BY_VALUE)) for leaf in outer):
        return outer, structure.unflatten, structure
    inner = [jax.tree.flatten(leaf, is_leaf=tasks.is_module) for leaf in outer]

    def unflatten(values: list[Any]) -> Any:
        left = iter(values)
        parts = [jax.tree.unflatten(treedef, [next(left) for _ in range(treedef.num_leaves)]) for _, treedef in inner]
        return structure.unflatten(parts)

    leaves = [leaf for part, _ in inner for leaf in part]
    return leaves, unflatten, (structure, tuple(treedef for _, treedef in inner))


_by_jax: dict[type, bool] = dict.fromkeys((dict, list, tuple, type(None), int, float), False)


def _is_by_jax(value: Any) -> bool:
    """Whether a class is registered with JAX: the author of a dataclass has then said which fields are static."""
    kind = value.__class__
    known = _by_jax.get(kind)
    if known is None:
        is_tuple = isinstance(value, tuple)
        known = _by_jax[kind] = not is_tuple and not jax.tree_util.all_leaves([value])
    return known


def form(leaf: Any) -> Hashable | None:
    if isinstance(leaf, jax.Array):
        return leaf.aval, leaf.sharding, leaf.committed
    return (np.ndarray, leaf.dtype, leaf.shape) if _is_as_in_jax(leaf) else None


def _is_as_in_jax(leaf: Any) -> bool:
    """Whether it is a NumPy array that ``jax.jit`` takes as it is.

    It would round float64 to float32, also where the function computes in NumPy's double precision.
    """
    if type(leaf) is not np.ndarray or leaf.dtype.kind in "OSUmM":  # objects, texts, dates
        return False
    return bool(jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype)


def modes() -> Hashable:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh, *(getattr(jax.config, setting, None) for setting in _SETTINGS)


def observe(call: Call) -> tuple[Any, Tracer]:
    on_host = [(array, array.tobytes()) for array in call.tensors if isinstance(array, np.ndarray)]
    result = wait(call.plainly())
    if any(array.tobytes() != before for array, before in on_host):
        return result, _refuse("it changes a NumPy array that it is given")
    if any(isinstance(array, jax.Array) and array.is_deleted() for array in call.tensors):
        return result, _refuse("it donates an argument (donate_argnums), which a trial would need again")
    return result, lambda reached: trace(call)


def _refuse(why: str) -> Tracer:
    def trace(reached: Sequence[Any]) -> Traced:
        raise CannotTrace(why)

    return trace


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
        computed, how = split_result(result, tensors, _tracer, (*BY_VALUE, jax.Array), call.others)
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
