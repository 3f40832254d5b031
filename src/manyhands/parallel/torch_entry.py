"""``parallel`` of manyhands.torch, and the backend ``"manyhands"`` of ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, Unpack, overload

from manyhands.backends.torch import tasks
from manyhands.backends.torch.dynamo import backend as dynamo
from manyhands.errors import EngineError
from manyhands.parallel.function import Parallel
from manyhands.parallel.graphs import Graphs
from manyhands.parallel.interface import P, R, refuse_threads
from manyhands.parallel.planner import PlanOptions as GraphOptions
from manyhands.tasks.arguments import FrameworkHooks
from manyhands.tasks.scope import parallel as Scope


class Options(TypedDict, total=False):
    """The options of :class:`Parallel`."""

    pure: bool
    dynamic: bool | None
    reuse_outputs: bool
    memory: float
    compile: bool
    synchronous: bool


_DEFAULTS: dict[str, object] = Parallel.__init__.__kwdefaults__ or {}


class _ScopeOrDecorator(Scope):
    """``parallel(...)`` without a function: a scope for tasks, or the decorator ``@parallel(memory=2.0)``."""

    def __init__(self, threads: int | None, options: Options) -> None:
        super().__init__(threads, synchronous=options["synchronous"], hooks=FrameworkHooks.of(tasks))
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
        refuse_threads(self._threads)
        return Parallel(function, **self._options)


@overload
def parallel(function: Callable[P, R], **options: Unpack[Options]) -> Parallel[P, R]: ...


@overload
def parallel(function: None = None, *, threads: int | None = ..., **options: Unpack[Options]) -> _ScopeOrDecorator: ...


def parallel(
    function: Callable[P, R] | None = None,
    *,
    pure: bool = False,
    dynamic: bool | None = None,
    reuse_outputs: bool = False,
    memory: float = 1.3,
    compile: bool = False,
    synchronous: bool = False,
    threads: int | None = None,
) -> Parallel[P, R] | _ScopeOrDecorator:
    """``fast = parallel(fn)``: gives what ``fn`` gives, sooner where that is possible; ``with parallel():`` for tasks.

    The function is captured by Dynamo, as in ``torch.compile(fn, backend="manyhands")``. Each graph is planned over
    lanes at its first call; plans are proved, compared and timed, and the fastest is kept. ``fast.explain()`` says what
    was chosen and why. ``pure=True`` traces the function whole instead, with backward passes and optimizers, on virtual
    devices too, and replays the trace: for functions without effects but on tensors. ``dynamic`` is
    ``torch.compile``'s. Results belong to the caller, unless ``reuse_outputs=True`` allows the next call to overwrite
    them. A plan takes at most ``memory`` times what plain execution takes. ``compile=True`` also tries each graph
    compiled as a whole (Inductor). ``synchronous=True`` runs the schedule's order, or a scope's tasks, in the caller's
    thread, for debugging. In a scope, ``task(fn)(a, b)`` runs beside others, on one of ``threads`` threads. As a
    decorator: ``@parallel``, ``@parallel(memory=2.0)``, of methods too.
    """
    given = Options(
        pure=pure, dynamic=dynamic, reuse_outputs=reuse_outputs, memory=memory, compile=compile, synchronous=synchronous
    )
    opened = _ScopeOrDecorator(threads, given)
    return opened if function is None else opened(function)


def compile_backend(module: dynamo.GraphModule, inputs: Sequence[object], **settings: object) -> Callable[..., object]:
    """``torch.compile(model, backend="manyhands")``: forward and backward graphs, each planned over lanes.

    On a GPU each graph is compiled as a whole first; lanes of uncompiled operations are tried once a program has made
    so many calls that this can be won back. ``options={"fuse": False}`` compiles nothing. How each graph is run, and
    why it is not faster, is logged: ``logging.basicConfig()``, then
    ``logging.getLogger("manyhands").setLevel(logging.DEBUG)``, before the model is called.
    """
    fuse = _fuse(settings)
    graphs = Graphs(GraphOptions(compile=fuse, later=True), "a graph")
    return dynamo.compile_with(module, inputs, functools.partial(graphs.make, None), to_compile=fuse)


def _fuse(settings: Mapping[str, object]) -> bool:
    """``torch.compile(..., backend="manyhands", options={"fuse": False})``, checked."""
    if settings.get("mode") not in (None, "default"):
        raise EngineError(f"mode={settings['mode']!r} is Inductor's: the backend 'manyhands' measures what is fastest")
    options = settings.get("options") or {}
    assert isinstance(options, dict)
    if unknown := options.keys() - {"fuse"}:
        raise EngineError(
            f"the backend 'manyhands' has no option {', '.join(sorted(unknown))}: there is 'fuse' (also compile each "
            "graph as a whole), as in options={'fuse': False}"
        )
    fuse = options.get("fuse", True)
    if not isinstance(fuse, bool):
        raise EngineError(f"options={{'fuse': {fuse!r}}}: give True or False")
    return fuse
