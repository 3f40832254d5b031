"""``parallel`` of the PyTorch door, and the backend ``"manyhands"`` of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypedDict, overload

from manyhands.backends.planning import Planner
from manyhands.backends.torch import planning, tasks
from manyhands.backends.torch.dynamo import backend as dynamo
from manyhands.errors import EngineError
from manyhands.parallel.function import Parallel
from manyhands.parallel.interface import P, R
from manyhands.tasks.hooks import Hooks
from manyhands.tasks.scope import no_threads
from manyhands.tasks.scope import parallel as Scope

if TYPE_CHECKING:  # the type checker checks the module against the protocol
    from manyhands.backends.planning import Planning
    from manyhands.backends.torch.capture.call import Call
    from manyhands.backends.torch.capture.trace import Trace
    from manyhands.backends.torch.run.codegen import Plan
    from manyhands.backends.torch.run.streams import Gpus

    _PLANNING: Planning[Trace, Call, Gpus, Plan] = planning


class Options(TypedDict):
    """The options of :class:`Parallel`."""

    reuse_outputs: bool
    memory: float
    compile: bool
    synchronous: bool


_DEFAULTS: dict[str, object] = Parallel.__init__.__kwdefaults__ or {}


class _ScopeOrDecorator(Scope):
    """``parallel(...)`` without a function: a scope for tasks, or the decorator ``@parallel(memory=2.0)``."""

    def __init__(self, threads: int | None, options: Options) -> None:
        hooks = Hooks(tasks.memory_of, tasks.parts_of, tasks.version_of, tasks.bound)
        super().__init__(threads, synchronous=options["synchronous"], hooks=hooks)
        self._options = options

    def __enter__(self) -> Scope:
        for name, value in self._options.items():
            if value != _DEFAULTS[name] and name != "synchronous":
                raise EngineError(
                    f"with parallel({name}={value}): explicit tasks are not planned; write with parallel(): here, and "
                    f"parallel(fn, {name}={value}) for a function"
                )
        return super().__enter__()

    def __call__(self, function: Callable[P, R]) -> Parallel[P, R]:
        if self._threads is not None:
            raise EngineError(no_threads(self._threads))
        return Parallel(function, planning, **self._options)


@overload
def parallel(
    function: Callable[P, R],
    *,
    reuse_outputs: bool = ...,
    memory: float = ...,
    compile: bool = ...,
    synchronous: bool = ...,
) -> Parallel[P, R]: ...


@overload
def parallel(
    function: None = None,
    *,
    reuse_outputs: bool = ...,
    memory: float = ...,
    compile: bool = ...,
    synchronous: bool = ...,
    threads: int | None = ...,
) -> _ScopeOrDecorator: ...


def parallel(
    function: Callable[P, R] | None = None,
    *,
    reuse_outputs: bool = False,
    memory: float = 1.3,
    compile: bool = False,
    synchronous: bool = False,
    threads: int | None = None,
) -> Parallel[P, R] | _ScopeOrDecorator:
    """``fast = parallel(fn)``: gives what ``fn`` gives, sooner where that is possible; ``with parallel():`` for tasks.

    The first call traces the function for its arguments' shapes, plans it over lanes, proves and measures the plans,
    and keeps the fastest; ``fast.explain()`` says what was chosen and why. Results belong to the caller, unless
    ``reuse_outputs=True`` allows the next call to overwrite them. A plan takes at most ``memory`` times what plain
    execution takes. ``compile=True`` also tries plans in which runs of small operations are compiled (Inductor), each a
    task of its own. ``synchronous=True`` runs the schedule's order, or a scope's tasks, in the caller's thread, for
    debugging. In a scope, ``task(fn)(a, b)`` runs beside others, on one of ``threads`` threads. As a decorator:
    ``@parallel``, ``@parallel(memory=2.0)``, of methods too.
    """
    options = Options(reuse_outputs=reuse_outputs, memory=memory, compile=compile, synchronous=synchronous)
    opened = _ScopeOrDecorator(threads, options)
    return opened if function is None else opened(function)


def compile_backend(module: dynamo.GraphModule, inputs: Sequence[object], **settings: object) -> Callable[..., object]:
    """``torch.compile(model, backend="manyhands")``: forward and backward graphs, each planned over lanes.

    On a GPU each graph is compiled as a whole first; runs of small operations are compiled, for lanes to run them side
    by side, once a program has made so many calls that this can be won back. ``options={"fuse": False}`` compiles
    nothing. How each graph is run, and why it is not faster, is logged: ``logging.basicConfig()``, then
    ``logging.getLogger("manyhands").setLevel(logging.DEBUG)``, before the model is called.
    """
    fuse = dynamo.options_from(settings).get("fuse", True)

    def make(function: Callable[..., object], reuse: bool) -> Planner:
        graph = Parallel(function, planning, compile=fuse, reuse_outputs=reuse)
        graph.compiles_regions_later = True  # the first step must not wait for what pays off only by the last
        return graph.planner()

    return dynamo.compile_with(module, inputs, make, writes_in_graph=True, to_compile=fuse)


dynamo.register(compile_backend, only_if_loaded=True)
