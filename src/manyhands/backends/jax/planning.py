"""What :mod:`manyhands.parallel.delegated` needs of JAX: jaxprs as graphs, ``jax.jit`` as the way to run them.

A function is traced once, into a jaxpr; what runs is that jaxpr under ``jax.jit``, with the arrays that the function
takes from outside as arguments of it. So Python code is never run again behind the caller's back, and large weights
are not compiled in as constants.

``jax.jit`` computes on one device and takes no notice of ``device_put`` to another: a function over several devices is
run as it is written, and JAX's asynchronous dispatch lets the devices work at the same time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from manyhands import machine, tree
from manyhands.backends.jax.graph import Graph
from manyhands.backends.traced import (
    Call,
    Outputs,
    Same,
    Traced,
    compared,
    content_of,
    difference,
    refuse_unknown,
    told,
)
from manyhands.errors import CannotTrace

name = "jax"
PLAINLY = "JAX issues operations one by one and does not wait for them"
BATCH = "jax.vmap over stacked arrays makes them one operation"
LANES = "XLA fuses and orders operations as it likes"
PROFILER = "JAX does not tell when it ran which operation; jax.profiler.trace(folder) writes what it knows"
_BY_VALUE = (bool, int, float, complex, str, bytes, range, slice, type, np.dtype)


# Calls


def call(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call | None:
    """The call by which calls like it are known; None where JAX is tracing."""
    leaves, unflatten, structure = _flatten((arguments, keywords))
    tensors: list[Any] = []
    others: list[Any] = []
    known: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, jax.Array):
            others.append(leaf)
            known.append((type(leaf), repr(leaf)) if isinstance(leaf, _BY_VALUE) else Same(leaf))
        elif isinstance(leaf, jax.core.Tracer):
            return None
        else:
            tensors.append(leaf)
            known.append((leaf.aval, leaf.sharding, leaf.committed))

    def rebuild(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = iter(values)
        return unflatten([next(given) if isinstance(leaf, jax.Array) else leaf for leaf in leaves])  # type: ignore[no-any-return]

    return Call(arguments, keywords, tensors, others, (structure, tuple(known), _modes()), rebuild)


def _flatten(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Any]:
    """The leaves, how to put them together again, and the structure.

    Our own trees keep the order of dicts, which JAX's do not; what is registered with JAX only is taken apart by JAX.
    """
    outer, structure = tree.flatten(value)
    if all(isinstance(leaf, (jax.Array, *_BY_VALUE)) for leaf in outer):
        return outer, structure.unflatten, structure
    inner = [jax.tree.flatten(leaf, is_leaf=_is_nnx if _nnx_classes() else None) for leaf in outer]

    def unflatten(values: list[Any]) -> Any:
        left = iter(values)
        parts = [jax.tree.unflatten(one, [next(left) for _ in range(one.num_leaves)]) for _, one in inner]
        return structure.unflatten(parts)

    leaves = [leaf for part, _ in inner for leaf in part]
    return leaves, unflatten, (structure, tuple(one for _, one in inner))


def _modes() -> tuple[Any, ...]:
    config = jax.config
    return (
        config.jax_enable_x64,
        config.jax_default_device,
        config.jax_default_matmul_precision,
        config.jax_disable_jit,
        config.jax_numpy_dtype_promotion,
    )


def parts(value: Any) -> Iterable[tuple[str, Callable[[], Any]]] | None:
    """Arrays never change; a Flax variable is the array in it, a Flax module its attributes."""
    if isinstance(value, jax.Array):
        return ()
    if isinstance(value, np.ndarray):
        return content_of(value)
    if not _is_nnx(value):
        return None
    variable: Any = _nnx_classes()[1]
    if isinstance(value, variable):
        return [("value", value.get_raw_value)]
    own = vars(value)
    return [(word, functools.partial(own.get, word)) for word in [*own] if not word.startswith("_pytree__")]


def _nnx_classes() -> tuple[type, ...]:
    nnx = sys.modules.get("flax.nnx")
    return (nnx.Pytree, nnx.Variable) if nnx is not None and hasattr(nnx, "Pytree") else ()


def _is_nnx(value: Any) -> bool:
    return isinstance(value, _nnx_classes())


# Running


def observe(function: Callable[..., Any], one: Call) -> tuple[Any, None]:
    """Plain execution to its end; nothing is seen of it."""
    return wait(function(*one.arguments, **one.keywords)), None


def wait(result: Any) -> Any:
    return jax.block_until_ready(result)


@contextmanager
def untouched(traced: Traced) -> Iterator[Callable[[], None]]:
    """Nothing can be written to."""
    yield lambda: None


def outcome(result: Any, traced: Traced) -> list[Any]:
    return _flatten(result)[0]


def equal(ones: Sequence[Any], others: Sequence[Any]) -> tuple[bool, float]:
    return compared(ones, others, _numbers, lambda x: (x.aval, x.sharding.device_set))


def _numbers(value: Any) -> Any:
    if not isinstance(value, jax.Array):
        return None
    return np.asarray(jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value)


def lanes(device: str) -> int:
    """How many operations run at once: on the CPU XLA's threads take independent ones."""
    return 1 if device.startswith("gpu") else machine.usable_cores()


# Tracing


def trace(function: Callable[..., Any], one: Call, outside: Any, seen: None) -> Traced:
    refuse_unknown(one.others, lambda value: isinstance(value, _BY_VALUE) or outside.watches(value))
    if jax.config.jax_disable_jit:
        raise CannotTrace("jax.jit is switched off (jax_disable_jit)")
    shapes: list[Outputs] = []

    def flat(*tensors: Any) -> list[Any]:
        arguments, keywords = one.rebuild(tensors)
        computed, outputs = _taken_apart(function(*arguments, **keywords), tensors)
        shapes.append(outputs)
        return computed

    try:
        closed = jax.make_jaxpr(flat)(*one.tensors)
    except CannotTrace:
        raise
    except Exception as error:
        raise CannotTrace(f"jax.jit cannot trace it: {told(error)}") from error
    graph = Graph(one.tensors, closed)
    traced = Traced(graph.tasks, "jax.jit", None, forms=graph.forms)
    if closed.effects:
        traced.notes.append("jax.jit is not used: it prints or calls back to the host, and trying out would do that")
    elif len(graph.devices) > 1:
        traced.notes.append(
            f"jax.jit is not used: it computes on one device, and this function uses {', '.join(sorted(graph.devices))}"
        )
    else:
        traced.compiled = _compiled(closed, shapes[-1])
    return traced


def _taken_apart(result: Any, tensors: Sequence[Any]) -> tuple[list[Any], Outputs]:
    leaves, unflatten, _ = _flatten(result)
    places = {id(tensor): number for number, tensor in enumerate(tensors)}
    computed: list[Any] = []
    kinds: list[tuple[str, Any]] = []
    for leaf in leaves:
        if id(leaf) in places:
            kinds.append(("argument", places[id(leaf)]))
        elif isinstance(leaf, jax.core.Tracer):
            computed.append(leaf)
            kinds.append(("computed", None))
        elif isinstance(leaf, (*_BY_VALUE, jax.Array)):
            kinds.append(("value", leaf))
        else:
            raise CannotTrace(f"a result is a {type(leaf).__name__}: jax.jit would give the same one at every call")
    return computed, Outputs(unflatten, kinds)


def _compiled(closed: ClosedJaxpr, outputs: Outputs) -> Callable[[Call], Any]:
    jaxpr, constants = closed.jaxpr, list(closed.consts)
    run = jax.jit(lambda constants, tensors: jax.core.eval_jaxpr(jaxpr, constants, *tensors))

    def compiled(one: Call) -> Any:
        return outputs.put_together(run(constants, one.tensors), one.tensors)

    return compiled


# What explicit tasks need of JAX (manyhands.tasks.scope)

memory_of = id  # an array never changes, so none needs to be known by its memory
_ARRAYS = (jax.Array, np.ndarray)
_REFERENCES: Any = getattr(jax, "Ref", ())


def parts_of(value: Any) -> Sequence[Any] | None:
    """What is read and written with an object of Flax: with a variable its value, with a module its attributes."""
    if isinstance(value, (jax.Array, _REFERENCES)):
        return ()
    return [look() for _, look in parts(value) or ()] if _is_nnx(value) else None


def version_of(value: Any) -> Any:
    """A variable of Flax is its value, a module of the user's what it holds; arrays never change, references do."""
    if isinstance(value, _REFERENCES):
        return np.asarray(value[...]).tobytes()
    if not _is_nnx(value):
        return None
    variable: Any = _nnx_classes()[1]
    if isinstance(value, variable):
        return _Value(value.get_raw_value())
    # nnx.jit writes the attributes of Flax's own modules back as they were.
    if type(value).__module__.startswith("flax."):
        return None
    return _content(value, ())


def _content(value: Any, above: tuple[int, ...]) -> Any:
    """A module by its attributes, a variable by its value; ``above``: the modules that this one is in."""
    variable: Any = _nnx_classes()[1]
    if isinstance(value, variable):
        return _Value(value.get_raw_value())
    if not _is_nnx(value):
        return _Value(value)
    inside = () if id(value) in above else parts(value) or ()
    return type(value), {word: _content(look(), (*above, id(value))) for word, look in inside}


# What takes the attributes out of the modules that it is given, and puts them back.
_TRANSFORMS = {
    "jit",
    "pmap",
    "shard_map",
    "vmap",
    "scan",
    "remat",
    "checkpoint",
    "grad",
    "value_and_grad",
    "vjp",
    "jvp",
}
_TRANSFORMS |= {"custom_vjp", "cond", "switch", "while_loop", "fori_loop", "eval_shape", "cached_partial"}


def in_turn(objects: list[Any], words: Set[str]) -> list[Any]:
    """Flax's modules, where a task calls a transform of Flax: it empties them and fills them again."""
    modules = [one for one in objects if isinstance(one, _nnx_classes()[:1])]
    if not modules or not (words & _TRANSFORMS or any(_is_transform(one) for one in objects)):
        return []
    return modules


def _is_transform(value: Any) -> bool:
    return type(value).__module__.startswith("flax.nnx.transforms")


class _Value:
    """The value of a variable; an array that was written back as it was is the same one (``nnx.jit`` does that)."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value) or self._value is other._value:
            return isinstance(other, _Value)
        if not isinstance(self._value, _ARRAYS) or not isinstance(other._value, _ARRAYS):
            same_kind = type(self._value) is type(other._value) and isinstance(self._value, (*_BY_VALUE, tuple))
            return bool(same_kind and self._value == other._value)
        return difference(*(jax.random.key_data(one) if _is_key(one) else one for one in (self._value, other._value)))[
            0
        ]

    __hash__ = None  # type: ignore[assignment]


def _is_key(array: Any) -> bool:
    return bool(jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key))


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's settings in ``with`` are a thread's own: the task's thread does as the one that gave it."""
    device, precision = jax.config.jax_default_device, jax.config.jax_default_matmul_precision
    wide = bool(jax.config.jax_enable_x64)

    def run(*arguments: Any, **keywords: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(jax.default_device(device))
            stack.enter_context(jax.default_matmul_precision(precision))
            stack.enter_context(jax.enable_x64(wide))
            return function(*arguments, **keywords)

    return run
