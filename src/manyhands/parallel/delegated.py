"""``parallel(fn)`` where the framework's own runtime finds the parallelism: JAX, TensorFlow, MXNet.

These frameworks run a function as one graph (``jax.jit``, ``tf.function``, MXNet's CachedOp) or issue its operations
asynchronously; manyhands does not choose lanes there. It does what is left to do: decide whether the framework's way
gives the same result and is faster, and say so.

The first call of a signature (structure, shapes, dtypes, devices, modes, plain values) is plain execution, and its
result is given back. It is watched: a function that changes Python state, prints, opens files or draws random numbers
of Python or NumPy would do so only once if it were compiled, so it is left alone. Else the function is traced, its
compiled form compared with plain execution, and both are timed in turns; plain execution stays where it is not slower.

A worked example: ``fn`` reads a global ``scale``. The first call with a 4x4 array runs plainly, then ``jax.jit(fn)`` is
compared and wins; the second call is compiled. A call with a 5x5 array is planned anew, and so is one after
``scale = 3.0``: the compiled function holds only for what it has found outside its arguments.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from manyhands.backends.traced import Call, Traced, told
from manyhands.errors import CannotTrace, EngineError, NotYet
from manyhands.parallel import delegated_report
from manyhands.parallel.arguments import must_be_function
from manyhands.parallel.choose_cpu import race
from manyhands.parallel.delegated_report import Planned
from manyhands.parallel.explain import advice, name_of
from manyhands.parallel.plan import PLAIN
from manyhands.parallel.plan_cache import NEVER_AGAIN, Plans
from manyhands.parallel.python_state import Outside
from manyhands.parallel.side_effects import Effects
from manyhands.schedule import picture as draw
from manyhands.schedule.timeline import Timeline
from manyhands.tasks.scope import no_threads
from manyhands.tasks.scope import parallel as Scope

_CLEARLY = 0.97  # of plain execution's time
_CLOSE = 1e-5  # how far results may be from plain execution's (a compiler may add in another order)
_SETTLING = 3  # calls in which a function may still change what is outside: models are often built by their first call


class Parallel:
    """A function that gives what the plain one gives, sooner where the framework's runtime can do that."""

    def __init__(self, function: Callable[..., Any], backend: Any) -> None:
        must_be_function(function)
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.backend = backend
        self._plans: Plans[Planned] = Plans()
        self._last: Planned | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        call = self.backend.call(arguments, keywords)
        if call is None:  # the framework is tracing: whoever does that compiles the whole
            return self.function(*arguments, **keywords)
        planned = self._plans.of(call.signature)
        if planned is None:
            return self._first(call)
        self._last = planned
        return planned.run(call)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a decorator of a method: the instance is its first argument."""
        return self if instance is None else types.MethodType(self, instance)

    # Telling

    def explain(self) -> str:
        """How the last call was run, what it took, what bounds it, and what the framework does not show."""
        return delegated_report.explain(name_of(self.function), self._must_have_run(), self.backend)

    def draw(self, path: str | Path) -> Path:
        """The graph that the framework shows as SVG, coloured by lane."""
        return draw.save(self._must_have_run().scheduled(), Path(path))

    def timeline(self, path: str | Path, *, simulated: bool = True) -> Path:
        """When each task would run on which lane: a trace (``.json``) or a picture (``.png``, ``.svg``).

        Simulated: the frameworks here do not tell when they run what. Their own profilers do.
        """
        if not simulated:
            raise EngineError(f"timeline(simulated=False): {self.backend.PROFILER}")
        return self.simulated().save(path)

    def simulated(self) -> Timeline:
        """The last call's graph on the runtime's lanes, in thought."""
        return delegated_report.simulated(self._must_have_run().scheduled())

    def _must_have_run(self) -> Planned:
        if self._last is None:
            raise EngineError("call the function first: it is planned for the arguments that it gets")
        return self._last

    # Planning

    def _first(self, call: Call) -> Any:
        """Run plainly, and plan for the calls to come."""
        if not self._plans.is_worth_one(call.signature):
            self._last = Planned(self._plainly, notes=[NEVER_AGAIN])
            return self._plainly(call)
        count = self._plans.count(call.signature)
        if (why := self._plans.why_no_more(call.signature)) is not None:
            self._keep(call, Planned(self._plainly, notes=[why]))
            return self._plainly(call)
        with Effects() as effects:
            reached = self._reached(call)
            start = time.perf_counter()
            result, seen = self.backend.observe(self.function, call)
            spent = time.perf_counter() - start
        planned = Planned(self._plainly, seconds={f"{PLAIN}, first call": spent})
        settling = False
        try:
            outside = reached()
            changed = outside.changed()
            settling = changed is not None and count < _SETTLING
            if effects.found or changed:
                raise CannotTrace(f"it {effects.found or f'changes {changed}, which is outside it'}")
            traced = self.backend.trace(self.function, call, outside, seen)
        except CannotTrace as error:
            planned.notes.append(f"cannot be traced: {error}")
            if settling or isinstance(error, NotYet):
                self._last = planned
                return result
        else:
            self._choose(planned, call, traced, result)
            planned.holds, planned.changed = outside.holds, outside.changed
            planned.recognising = min(self._recognised(call, outside) for _ in range(5))
        self._keep(call, planned)
        return result

    def _recognised(self, call: Call, outside: Outside) -> float:
        start = time.perf_counter()
        hash(self.backend.call(call.arguments, call.keywords).signature)
        outside.holds()
        return time.perf_counter() - start

    def _reached(self, call: Call) -> Callable[[], Outside]:
        """What the function takes from outside now; to be asked for later, because it may be what cannot be watched."""
        try:
            outside = Outside(self.function, call.others, self.backend.parts)
            if outside.too_large():
                raise CannotTrace("it reaches so much outside its arguments that watching it would cost too much")
        except CannotTrace as error:
            reason = error

            def refuse() -> Outside:
                raise reason

            return refuse
        return lambda: outside

    def _keep(self, call: Call, planned: Planned) -> None:
        self._last = planned
        self._plans.keep(call.signature, planned)

    def _plainly(self, call: Call) -> Any:
        return self.function(*call.arguments, **call.keywords)

    def _choose(self, planned: Planned, call: Call, traced: Traced, result: Any) -> None:
        """Compare the framework's way with plain execution in results and in time."""
        planned.notes += traced.notes
        if traced.compiled is not None:
            try:
                self._try(planned, call, traced, result)
            except Exception as error:  # out of memory, an operation that the compiler does not know
                planned.notes.append(f"{traced.way} is not used: {told(error)}")
        spent = planned.seconds.get(planned.name, next(iter(planned.seconds.values())))
        planned.schedule = delegated_report.scheduled(traced, self.backend.lanes, spent)
        planned.costs, planned.missing = traced.costs, traced.missing
        forms = traced.forms
        planned.advice = advice(planned.schedule.graph, forms, lambda one: self.backend.BATCH if forms[one] else None)

    def _try(self, planned: Planned, call: Call, traced: Traced, result: Any) -> None:
        backend, compiled = self.backend, traced.compiled
        assert compiled is not None

        def outcome(run: Callable[[Call], Any]) -> Any:
            with backend.untouched(traced):
                return backend.outcome(run(call), traced)

        expected = outcome(self._plainly) if traced.writes else backend.outcome(result, traced)
        same, difference = backend.equal(outcome(compiled), expected)
        if not same and difference > _CLOSE:
            how = f"differ by {difference:.1e}" if difference < math.inf else "are of another shape, type or device"
            planned.notes.append(f"{traced.way} is not used: its results {how}")
            return
        with backend.untouched(traced) as put_back:
            ways = [lambda: backend.wait(self._plainly(call)), lambda: backend.wait(compiled(call))]
            plain, own = race(ways, put_back)
        planned.seconds = {PLAIN: statistics.median(plain), traced.way: statistics.median(own)}
        ratio = statistics.median(mine / theirs for mine, theirs in zip(own, plain, strict=True))
        # A load from outside that hits only one of the two may be gone in a minute: the best rounds must agree.
        if max(ratio, min(own) / min(plain)) < _CLEARLY:
            planned.how = traced.way + (", equal to the bit" if same else f", equal to {difference:.0e}")
            planned.run = self._compiled(planned, traced, compiled)
        else:
            planned.notes.append(f"{traced.way} is not used: it is not faster here")

    def _compiled(self, planned: Planned, traced: Traced, compiled: Callable[[Call], Any]) -> Callable[[Call], Any]:
        """The compiled function; where it fails, plain execution says what is wrong in the function's own words."""

        def run(call: Call) -> Any:
            try:
                return compiled(call)
            except Exception as error:
                if traced.writes:
                    error.add_note(f"it was run as {traced.way}, and has perhaps written to variables already")
                    raise
                failure = told(error)
            result = self._plainly(call)
            planned.run, planned.how = self._plainly, PLAIN
            planned.notes.append(
                f"{traced.way} failed where plain execution does not; it is not used any more: {failure}"
            )
            return result

        return run


class Offer:
    """``fast = parallel(fn)``: gives what ``fn`` gives, sooner where that is possible; ``with parallel():`` for tasks.

    The first call runs plainly; then the function is traced for its arguments' shapes and given to the framework's own
    runtime. That is used if its results are the same and it is faster; ``fast.explain()`` says what was chosen and why.
    What the function takes from outside is watched: where it is another, the function is planned anew. Not seen: the
    clock, the network, and what is reached only through C code. In a scope, ``task(fn)(a, b)`` runs beside others on
    one of ``threads`` threads; ``synchronous=True`` runs tasks in the caller's thread, in order, for debugging.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @overload
    def __call__(
        self, function: Callable[..., Any], *, reuse_outputs: bool = ..., memory: float = ..., synchronous: bool = ...
    ) -> Parallel: ...

    @overload
    def __call__(self, function: None = None, *, threads: int | None = ..., synchronous: bool = ...) -> Scope: ...

    def __call__(
        self,
        function: Callable[..., Any] | None = None,
        *,
        reuse_outputs: bool = False,
        memory: float = 1.3,
        synchronous: bool = False,
        threads: int | None = None,
    ) -> Parallel | Scope:
        backend = self._backend
        runtime = f"{backend.name}'s own runtime"
        if reuse_outputs:
            raise EngineError(
                f"parallel(reuse_outputs=True): {runtime} gives fresh results at every call; leave it out"
            )
        if memory != 1.3:
            raise EngineError(f"parallel(memory={memory}): {runtime} decides what memory it takes; leave it out")
        if function is None:
            return Scope(
                threads,
                synchronous=synchronous,
                memory_of=backend.memory_of,
                parts_of=backend.parts_of,
                version_of=backend.version_of,
                bound=backend.bound,
                in_turn=getattr(backend, "in_turn", None),
            )
        if synchronous:
            raise EngineError(f"parallel(synchronous=True): {runtime} chooses the order; for debugging call fn itself")
        if threads is not None:
            raise EngineError(no_threads(threads))
        return Parallel(function, backend)
