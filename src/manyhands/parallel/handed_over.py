"""``parallel(fn)`` where the framework's own runtime finds the parallelism: JAX, TensorFlow, MXNet.

manyhands hands the function to ``jax.jit``, to ``tf.function``, or calls it as it is (MXNet's engine is asynchronous).
The contract is theirs: a function is traced once for each structure, shape, dtype and plain value of its arguments, and
what it reads from Python besides its arguments is read then. There is no plan of ours to draw.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack, overload

from manyhands.errors import EngineError
from manyhands.parallel.explain import name_of
from manyhands.parallel.interface import P, ParallelFunction, R, refuse_threads
from manyhands.parallel.plan import Plan
from manyhands.tasks.arguments import FrameworkHooks
from manyhands.tasks.scope import parallel as Scope

if TYPE_CHECKING:  # the type checker checks the three modules against the protocol
    from manyhands.backends.jax import parallel as _jax
    from manyhands.backends.mxnet import parallel as _mxnet
    from manyhands.backends.tensorflow import parallel as _tensorflow

    _RUNTIMES: tuple[Runtime, ...] = (_jax, _mxnet, _tensorflow)


class Runtime(Protocol):
    """The module ``parallel`` of a framework; it has the answers for explicit tasks, too."""

    __name__: str
    name: str
    RUN_AS: str  # what runs a function: "jax.jit"
    SCHEDULER: str  # who decides what runs when
    PROFILER: str  # what shows when each operation ran

    def hand_over(self, function: Callable[P, R], /) -> Callable[P, R]: ...


class HandedOver(ParallelFunction[P, R]):
    """A function that the framework's own runtime runs."""

    def __init__(self, function: Callable[P, R], runtime: Runtime) -> None:
        super().__init__(function)
        self.runtime = runtime
        self._run = runtime.hand_over(function)

    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> R:
        return self._run(*arguments, **keywords)

    def explain(self) -> str:
        return f"{name_of(self.function)}: run as {self.runtime.RUN_AS}; {self.runtime.SCHEDULER}"

    @property
    def planned(self) -> Plan:
        raise self._no_plan()

    def _stored(self) -> tuple[object, ...]:
        return _restore, (self.function, self.runtime.__name__)

    def _no_plan(self) -> EngineError:
        name, runtime = name_of(self.function), self.runtime
        return EngineError(
            f"{runtime.name}'s own runtime schedules {name}, so manyhands has no plan to draw, time or forecast: "
            f"{runtime.PROFILER} shows when each operation ran; written in torch, {name} would be planned"
        )


def _restore(function: Callable[..., object], runtime: str) -> HandedOver[..., object]:
    return HandedOver(function, importlib.import_module(runtime))


class _ScopeOrDecorator(Scope):
    """``parallel()`` without a function: a scope for tasks, or the decorator ``@parallel()``."""

    def __init__(self, runtime: Runtime, threads: int | None, synchronous: bool) -> None:
        super().__init__(threads, synchronous=synchronous, hooks=FrameworkHooks.of(runtime))
        self._runtime = runtime

    def __call__(self, function: Callable[P, R]) -> HandedOver[P, R]:
        if self._synchronous:
            raise EngineError(
                f"parallel(fn, synchronous=True): {self._runtime.name}'s own runtime chooses the order; for debugging "
                "call fn itself"
            )
        refuse_threads(self._threads)
        return HandedOver(function, self._runtime)


class _HandedOverOptions(TypedDict, total=False):
    """PyTorch's options, without ``dynamic``; some are refused."""

    pure: bool
    reuse_outputs: bool
    memory: float
    compile: bool
    synchronous: bool


class ParallelEntry:
    """``fast = parallel(fn)``: ``fn`` run by the framework's own runtime; ``with parallel():`` for tasks.

    ``fn`` is handed to ``jax.jit`` or ``tf.function``, with their contract: what it reads from Python besides its
    arguments is read once, when it is traced. That is what ``pure=True`` means, which changes nothing here. MXNet runs
    ``fn`` as it is. In a scope, ``task(fn)(a, b)`` runs beside others on one of ``threads`` threads;
    ``synchronous=True`` runs tasks in the caller's thread, in order, for debugging. As a decorator: ``@parallel``, of
    methods too.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @overload
    def __call__(self, function: Callable[P, R], **options: Unpack[_HandedOverOptions]) -> HandedOver[P, R]: ...

    @overload
    def __call__(
        self, function: None = None, *, threads: int | None = ..., **options: Unpack[_HandedOverOptions]
    ) -> _ScopeOrDecorator: ...

    def __call__(
        self,
        function: Callable[P, R] | None = None,
        *,
        pure: bool = False,
        reuse_outputs: bool = False,
        memory: float = 1.3,
        compile: bool = False,
        synchronous: bool = False,
        threads: int | None = None,
    ) -> HandedOver[P, R] | _ScopeOrDecorator:
        refused = {
            f"reuse_outputs={reuse_outputs}": reuse_outputs and "returns new results at every call",
            f"memory={memory!r}": memory != 1.3 and "decides what memory it takes",
            f"compile={compile}": compile and "decides what is compiled",
        }
        for option, why in refused.items():
            if why:
                raise EngineError(f"parallel({option}): {self._runtime.name}'s own runtime {why}; leave it out")
        opened = _ScopeOrDecorator(self._runtime, threads, synchronous)
        return opened if function is None else opened(function)
