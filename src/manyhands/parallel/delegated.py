"""``parallel(fn)`` where the framework's own runtime finds the parallelism: JAX, TensorFlow, MXNet.

These frameworks run a function as one graph (``jax.jit``, ``tf.function``, MXNet's CachedOp); manyhands does not choose
lanes there. It hands the function over, compares once, and shows the graph.

The first call of a signature (structure, shapes, dtypes, devices, modes, plain values) is plain execution, and its
result is returned. Then the function is traced, and the framework runs it for the same arguments: if the results are
the same, the framework runs every later call. Which of the two is faster is not measured.

A trace depends on what the function reads from outside its arguments. :mod:`manyhands.tasks.reachable` finds these
values, as it does for explicit tasks, and they are compared before each call: a closure variable or global that was
reassigned, a list that has grown, a changed attribute of an object. After a change the function is traced again. If the
first call itself changes such a value, prints, opens a file or draws random numbers of Python or NumPy, the function
stays plain: compiled, it would do so only once. Values that the search does not find are constants, as they are for
``jax.jit`` and ``tf.function``.

A worked example: ``fn`` reads a global ``scale``. The first call with a 4x4 array runs plainly, then ``jax.jit(fn)``
gives the same result; the second call is compiled. A call with a 5x5 array is traced again, and so is a call after
``scale = 3.0``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, overload

from manyhands.addresses import Same
from manyhands.backends import planning
from manyhands.backends.runtime import Call, Run, Runtime, Traced, call_of, compared
from manyhands.errors import CannotTrace, EngineError, NotYet, first_line, type_in_words
from manyhands.parallel.explain import advice
from manyhands.parallel.interface import P, ParallelFunction, R
from manyhands.parallel.plan import Planned
from manyhands.parallel.plan_cache import NEVER_AGAIN, Plans
from manyhands.parallel.side_effects import Effects
from manyhands.parallel.way import AS_WRITTEN, TO_THE_BIT, Executor, Way, close
from manyhands.python_code.names import is_foreign, why_unwatched
from manyhands.schedule.check import check
from manyhands.schedule.forecast import Forecast
from manyhands.schedule.graph import Graph, graph
from manyhands.schedule.lanes import Lane, Schedule, schedule
from manyhands.schedule.pictures.timeline import Timeline
from manyhands.schedule.simulate import simulate
from manyhands.tasks.hooks import Hooks
from manyhands.tasks.reachable import Objects, Reached
from manyhands.tasks.scope import no_threads
from manyhands.tasks.scope import parallel as Scope
from manyhands.tasks.undeclared_writes import Watch, in_words

if TYPE_CHECKING:  # the type checker checks the three modules against the protocol
    from manyhands.backends.jax import planning as _jax
    from manyhands.backends.mxnet import planning as _mxnet
    from manyhands.backends.tensorflow import planning as _tensorflow

    _RUNTIMES: tuple[Runtime, ...] = (_jax, _mxnet, _tensorflow)

_SETTLING = 3  # calls in which a function may still change outside values: models are often built by their first call
_WATCHED = 1 << 16  # bytes of a NumPy array outside that are compared at every call


class Parallel(ParallelFunction[P, R]):
    """A function with the results of the plain one, run by the framework's runtime if that gives the same results."""

    def __init__(self, function: Callable[P, R], backend: Runtime) -> None:
        super().__init__(function)
        self.backend = backend
        self._plans: Plans[Planned] = Plans()
        self._objects = Objects(Hooks(backend.tasks.memory_of, backend.tasks.parts_of, backend.version_of))

    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> R:
        call = call_of(self.backend, self.function, arguments, keywords)
        if call is None:  # the framework is tracing: the outer trace compiles everything
            return self.function(*arguments, **keywords)
        try:
            planned = self._plans.of(call.signature, arguments, keywords)
        except Exception as error:  # a user's structure that has no hash, or cannot be compared
            planned = Planned(
                self._plainly,
                notes=[f"its arguments cannot be compared: {first_line(error)}"],
            )
        if planned is None:
            return self._first(call)  # type: ignore[return-value]
        self._last = planned
        return planned.run(call.tensors, arguments, keywords)  # type: ignore[return-value]

    # Reports

    def measured(self) -> Timeline:
        raise EngineError(f"measured(), timeline(simulated=False): {self.backend.PROFILER}")

    def forecast(
        self, devices: int, *, lanes: int | None = None, bandwidth: float = 25e9, latency: float = 10e-6
    ) -> Forecast:
        raise EngineError(
            f"forecast({devices}): {self.backend.name}'s own runtime runs the function, so other devices cannot be "
            "simulated; PyTorch's parallel can"
        )

    def _can_measure(self) -> bool:
        return False

    # Planning

    def _first(self, call: Call) -> object:
        """Run plainly, and plan later calls."""
        if not self._plans.is_worth_one(call.signature):
            self._last = Planned(self._plainly, notes=[NEVER_AGAIN])
            return call.plainly()
        count = self._plans.count(call.signature)
        if (why := self._plans.why_no_more(call.signature)) is not None:
            self._keep(call, Planned(self._plainly, notes=[why]))
            return call.plainly()
        contents = _contents(self.backend, call)
        reached = self._objects.look(call.function, *call.others)
        outside = _Outside(self._objects, reached)
        before = self.backend.variables(reached.objects)
        with Effects() as effects:
            start = time.perf_counter()
            result, trace = self.backend.observe(call)
            spent = time.perf_counter() - start
        planned = Planned(self._plainly, seconds={Way(Executor.AS_WRITTEN, "first call"): spent})
        changed = outside.changed()
        try:
            if effects.seen or changed:
                raise CannotTrace(f"it {effects.seen or f'changes {changed}, which is outside it'}")
            if _contents(self.backend, call) != contents:
                raise CannotTrace("it puts something into a list or dict that it is given, or takes something out")
            self._must_be_watched(call, reached)
            traced = trace(reached.objects)
            planned.notes += traced.notes
            planned.holds, planned.changed = outside.holds, outside.changed
            self._compare(planned, call, traced, result, before)
            self._show(planned, traced)
        except CannotTrace as error:
            planned.notes.append(f"cannot be traced: {error}")
            if isinstance(error, NotYet) or (changed and count < _SETTLING):
                self._last = planned
                return result
        except Exception as error:  # the call itself succeeded: this error is ours
            planned.notes.append(f"could not be planned: {first_line(error)}")
        self._keep(call, planned)
        return result

    def _keep(self, call: Call, planned: Planned) -> None:
        self._last = planned
        self._plans.keep(call.signature, planned)

    def _must_be_watched(self, call: Call, reached: Reached) -> None:
        """Values other than tensors are constants of a trace: refuse those whose changes would go unnoticed."""
        for value in call.others:
            if isinstance(value, self.backend.BY_VALUE) or callable(value) or not is_foreign(type(value)):
                continue
            if self.backend.tasks.parts_of(value) is None:
                of = f" of {dtype}" if (dtype := getattr(value, "dtype", None)) is not None else ""
                raise CannotTrace(
                    f"an argument is {type_in_words(value)}{of}, whose contents may change unnoticed: make it a tensor"
                )
        for value in reached.objects:
            if (kind := why_unwatched(value)) is not None:
                raise CannotTrace(f"it uses {kind}, whose changes cannot be noticed")
        for value in reached.arrays:
            if getattr(value, "nbytes", 0) > _WATCHED:
                shape = getattr(value, "shape", None)
                raise CannotTrace(
                    f"it reads a NumPy array from outside its arguments, {shape}, which is too large to compare before "
                    "every call: make it a tensor"
                )

    def _compare(
        self, planned: Planned, call: Call, traced: Traced, result: object, before: list[tuple[object, object]]
    ) -> None:
        """Run the framework's way for the same arguments and variables; keep it if the results are the same."""
        backend, way, run = self.backend, self.backend.WAY, traced.run
        if run is None:
            return
        written = {id(write) for write in traced.writes}
        before = [(variable, value) for variable, value in before if id(variable) in written]
        if len(before) < len(written):
            planned.notes.append(f"{way} is not used: it writes to variables that cannot be restored")
            return
        expected = [*backend.flatten(result)[0], *(value for _, value in backend.variables(traced.writes))]
        try:
            for _ in range(2):  # the first run compiles it
                with backend.with_values(before):
                    start = time.perf_counter()
                    result_of_runtime = backend.wait(run(call.tensors))
                    spent = time.perf_counter() - start
                    results = [
                        *backend.flatten(result_of_runtime)[0],
                        *(value for _, value in backend.variables(traced.writes)),
                    ]
        except Exception as error:  # out of memory, an operation that the compiler does not know
            planned.notes.append(f"{way} is not used: {first_line(error)}")
            return
        comparison = compared(backend, results, expected)
        if comparison.close:
            planned.way = Way(Executor.RUNTIME, runtime=way)
            planned.exactness = TO_THE_BIT if comparison.same else close(comparison.difference)
            planned.run = self._delegated(planned, run, writes=bool(written))
            planned.seconds[planned.way] = spent
        else:
            how = (
                f"differ by {comparison.difference:.1e}"
                if comparison.difference < float("inf")
                else "are of another kind"
            )
            planned.notes.append(f"{way} is not used: its results {how}")

    def _delegated(self, planned: Planned, run: Run, *, writes: bool) -> planning.Run:
        """The framework's way; if it fails, plain execution raises the function's own error."""
        way = self.backend.WAY

        def delegated(tensors: Sequence[object], arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
            try:
                return run(tensors)
            except Exception as error:
                if writes:
                    error.add_note(f"it was run as {way}, and has perhaps written to variables already")
                    raise
                failure = first_line(error)
            result = self.plain(*arguments, **keywords)
            planned.run, planned.way, planned.exactness = self._plainly, AS_WRITTEN, None
            planned.notes.append(f"{way} failed where plain execution does not; it is not used any more: {failure}")
            return result

        return delegated

    def _show(self, planned: Planned, traced: Traced) -> None:
        """Add the tasks on the runtime's lanes, as it would run them, to the plan."""
        backend, forms = self.backend, traced.forms
        tasks = [dataclasses.replace(task, share=1 / backend.lanes(task.device)) for task in traced.tasks]
        on_lanes = _on_lanes(graph(tasks), backend.lanes)
        whole, spent = simulate(on_lanes).seconds, [*planned.seconds.values()][-1]
        if not traced.measured and whole > 0:
            tasks = [dataclasses.replace(task, seconds=task.seconds * spent / whole) for task in tasks]
            on_lanes = _on_lanes(graph(tasks), backend.lanes)
        check(on_lanes)
        planned.schedule = on_lanes
        costs = "measured one by one, in the first call" if traced.measured else "estimated from shapes"
        planned.about_runtime = f"the tasks' times are {costs}; timeline() is simulated. {backend.LANES}"
        planned.advice = advice(on_lanes.graph, forms, lambda number: backend.BATCH if forms[number] else None)


def _contents(backend: Runtime, call: Call) -> tuple[Hashable, list[Same]]:
    """What the containers among a call's arguments hold."""
    leaves, _, structure = backend.flatten((call.arguments, call.keywords))
    return structure, [Same(leaf) for leaf in leaves]


class _Outside:
    """The values that a function reached outside its arguments before a call, and whether they have changed."""

    def __init__(self, objects: Objects, reached: Reached) -> None:
        reached.variables += reached.helpers
        reached.locks = False  # a lock orders what threads do; here it is about what has changed
        self._names = {id(variable.value): variable.name for variable in reversed(reached.variables)}
        self._watch = Watch(objects, reached, frozenset())

    def holds(self) -> bool:
        return self._watch.changed() is None

    def changed(self) -> str | None:
        """The name, as the function knows it, of a value that has changed."""
        if (changed := self._watch.changed()) is None:
            return None
        return getattr(changed, "name", None) or self._names.get(id(changed)) or in_words(changed)


def _on_lanes(program: Graph, lanes: Callable[[str], int]) -> Schedule:
    kinds = dict.fromkeys((task.device, task.kind) for task in program.tasks)
    runtime_lanes = [
        Lane(device, kind, number)
        for device, kind in kinds
        for number in range(lanes(device) if kind == "compute" else 1)
    ]
    return schedule(program, runtime_lanes)


class _ScopeOrDecorator(Scope):
    """``parallel()`` without a function: a scope for tasks, or the decorator ``@parallel()``."""

    def __init__(self, backend: Runtime, threads: int | None, synchronous: bool) -> None:
        tasks = backend.tasks
        hooks = Hooks(tasks.memory_of, tasks.parts_of, tasks.version_of, tasks.bound, tasks.exclusive)
        super().__init__(threads, synchronous=synchronous, hooks=hooks)
        self._backend = backend

    def __call__(self, function: Callable[P, R]) -> Parallel[P, R]:
        if self._synchronous:
            raise EngineError(
                f"parallel(synchronous=True): {self._backend.name}'s own runtime chooses the order; for debugging call "
                "fn itself"
            )
        if self._threads is not None:
            raise EngineError(no_threads(self._threads))
        return Parallel(function, self._backend)


class ParallelEntry:
    """``fast = parallel(fn)``: ``fn`` run by the framework's own runtime; ``with parallel():`` for tasks.

    The first call runs plainly; then the function is traced for its arguments' shapes and given to ``jax.jit``,
    ``tf.function`` or a CachedOp. That is used if its results are the same; ``fast.explain()`` says what was chosen and
    why, ``fast.draw(path)`` shows the graph. Functions are to be pure, as for ``jax.jit``: what they take from outside
    is compared before each call as far as explicit tasks would follow it, and is a constant beyond that. In a scope,
    ``task(fn)(a, b)`` runs beside others on one of ``threads`` threads; ``synchronous=True`` runs tasks in the
    caller's thread, in order, for debugging. As a decorator: ``@parallel``, of methods too.
    """

    def __init__(self, backend: Runtime) -> None:
        self._backend = backend

    @overload
    def __call__(
        self,
        function: Callable[P, R],
        *,
        reuse_outputs: bool = ...,
        memory: float = ...,
        compile: bool = ...,
        synchronous: bool = ...,
    ) -> Parallel[P, R]: ...

    @overload
    def __call__(
        self,
        function: None = None,
        *,
        reuse_outputs: bool = ...,
        memory: float = ...,
        compile: bool = ...,
        synchronous: bool = ...,
        threads: int | None = ...,
    ) -> _ScopeOrDecorator: ...

    def __call__(
        self,
        function: Callable[P, R] | None = None,
        *,
        reuse_outputs: bool = False,
        memory: float = 1.3,
        compile: bool = False,
        synchronous: bool = False,
        threads: int | None = None,
    ) -> Parallel[P, R] | _ScopeOrDecorator:
        runtime = f"{self._backend.name}'s own runtime"
        if reuse_outputs:
            raise EngineError(
                f"parallel(reuse_outputs=True): {runtime} returns new results at every call; leave it out"
            )
        if memory != 1.3:
            raise EngineError(f"parallel(memory={memory!r}): {runtime} decides what memory it takes; leave it out")
        if compile:
            raise EngineError(f"parallel(compile=True): {runtime} decides what is compiled; leave it out")
        opened = _ScopeOrDecorator(self._backend, threads, synchronous)
        return opened if function is None else opened(function)
