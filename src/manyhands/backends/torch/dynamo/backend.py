"""``torch.compile(model, backend="manyhands")``: Dynamo captures the graphs, manyhands plans each over lanes.

PyTorch turns a model into a graph of its forward pass and one of its backward pass, both of pure ATen operations. Each
is a function of tensors, and is planned like any other on its first call, for the shapes of that call: it is traced,
measured, checked and compared with the unplanned graph, and runs unplanned if lanes gain nothing.

The last operations of the forward graph write to the model's buffers (running averages). If PyTorch does not let the
graph do so (an argument that needs gradients), the new values are results, and PyTorch copies them.

A planned function returns new tensors. A graph's results may also be its arguments or views of them (tensors saved for
the backward pass): those are computed outside the plan.

Tensors saved for the backward pass stay where the CUDA graph of the forward pass wrote them, and the CUDA graph of the
backward pass reads them there. If a forward pass is called while the saved tensors of the previous one are still
needed, it runs unplanned.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule as GraphModule  # what Dynamo passes to a backend

from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.reasons import lines_of
from manyhands.backends.torch.dynamo import graphs
from manyhands.backends.torch.run.cuda_graph import NoMemoryForResults

Function = Callable[..., Any]
_RECENT = 4  # plans of one graph that are kept: a graph may be for several shapes
_MOST = 8  # plans of one graph that are made
_OFTEN = 3  # calls with the same sizes, after which a graph for any sizes is planned for them
_REMEMBERED = 32  # such sizes that are counted


@dataclass(frozen=True)
class GraphPlan:
    """How a captured graph is run for arguments like those that it was planned with."""

    run: Callable[[Sequence[Any]], list[Any]]
    in_graph: bool  # a CUDA graph: results lie in its memory if they may be overwritten
    # After how many calls it pays to look for a better plan, and what does so; None: there is nothing left to try.
    later: tuple[int, Planner] | None = None
    # Called when there was no memory for its results: it is not used any more.
    failed: Callable[[Exception], None] = lambda error: None


# Plans a captured graph for arguments; None: it runs without a plan.
Planner = Callable[[graphs.CapturedGraph, tuple[Any, ...]], GraphPlan | None]


@dataclass(frozen=True)
class GraphRole:
    """What a graph is for."""

    place: str  # the user's lines that it stands for: "train.py:10-13"
    is_backward: bool
    reuse: bool  # the next call may overwrite its results
    writes: bool  # to arguments


Make = Callable[[GraphRole], Planner]


def compile_with(module: GraphModule, inputs: Sequence[Any], make: Make, *, to_compile: bool = False) -> Function:
    """The function that Dynamo calls instead of a module; ``make`` gives the planner of each of its graphs.

    ``to_compile``: graphs will be compiled, so what compiles them gets ready while PyTorch splits the module.
    """
    if to_compile:
        compat.prepare_inductor(inputs)
    spent, cleared = compat.facts_of_step(module.graph)
    graphs.detach(module, spent)
    if graphs.only_detaches(module):
        return module.forward
    graphs.keep_effects(module)
    places = _SteadyAddresses()
    name = lines_of(module, "a graph")

    def compiler(*, is_backward: bool) -> Callable[[GraphModule, Any], Function]:
        def compile_graph(graph: GraphModule, _: Any) -> Function:
            known = None if is_backward else compat.forward_graph()
            graphs.take_gradients(graph)
            return compat.make_boxed_function(_PlannedGraph(graph, make, places, known, name, is_backward=is_backward))

        return compile_graph

    forward = compiler(is_backward=False)
    compile_graphs = compat.aot_autograd(
        fw_compiler=forward,
        bw_compiler=compiler(is_backward=True),
        inference_compiler=forward,
        keep_inference_input_mutations=True,
    )
    run = compile_graphs(module, inputs)
    if not spent and not cleared:
        return run

    def call(*arguments: Any) -> Sequence[Any]:
        for number in cleared:  # before the new gradients need memory
            arguments[number].grad = None
        return [compat.spent_loss(value) if n in spent else value for n, value in enumerate(run(*arguments))]

    return call


class _SteadyAddresses:
    """The addresses that arguments of the forward and the backward graph have on every call."""

    def __init__(self) -> None:
        self.fixed: set[int] = set()  # of parameters and buffers, as the forward graph last saw them
        self.saved: set[int] = set()  # of the forward graph's results that the backward graph reads
        self.are_known = False  # whether the forward graph has been planned

    def __contains__(self, place: int) -> bool:
        return place in self.fixed or place in self.saved


class _PlannedGraph:
    """A graph whose computed results are planned, and whose other results are passed through.

    The forward and the backward graph of a model share ``places``. A backward graph runs unplanned until the forward
    graph has a plan: nothing can be planned during PyTorch's first call, and the tensors that the first call saves are
    at other addresses from then on.
    """

    def __init__(
        self,
        module: GraphModule,
        make: Make,
        places: _SteadyAddresses,
        forward: compat.ForwardGraph | None,
        name: str = "a graph",
        *,
        is_backward: bool = False,
    ) -> None:
        nodes = module.graph.nodes
        outputs: Any = next(node for node in nodes if node.op == "output").args[0]
        arguments = [node for node in nodes if node.op == "placeholder"]
        of_arguments = {memory for node in arguments for memory in graphs.memories(node)}
        self._whole, self._places = module, places
        self._computed = [number for number, value in enumerate(outputs) if graphs.is_computed(value, of_arguments)]
        number_of = {node: number for number, node in enumerate(arguments)}
        # The other results that are arguments, as (result, argument); the rest are computed from the arguments.
        same = [(number, number_of[value]) for number, value in enumerate(outputs) if value in number_of]
        left = {*range(len(outputs))} - {*self._computed} - {number for number, _ in same}
        self._others = sorted(number for number in left if not graphs.is_nothing(outputs[number]))
        self._make_views = graphs.part(module, [outputs[number] for number in self._others])
        # The index of each result in [None, *arguments, *planned results].
        sources = [0] * len(outputs)
        for at, number in enumerate(self._computed):
            sources[number] = 1 + len(arguments) + at
        for number, argument in same:
            sources[number] = 1 + argument
        self._sources = sources
        effects = [*map(graphs.has_effect, nodes)]
        # Views are computed outside of the plan, so they must not repeat its effects.
        repeated = any(map(graphs.has_effect, self._make_views.graph.nodes))
        moves = any(map(graphs.replaces_memory, nodes))  # of the tensor itself, which a plan does not get
        self._is_nothing_planned = moves or repeated or not (self._computed or any(effects))
        self._is_backward = is_backward
        # Given to a backward pass: the only arguments whose conjugation and negation nobody has checked.
        self._gradients = [number for number, node in enumerate(arguments) if node.name.startswith("tangents")]
        if not is_backward:
            places.are_known = self._is_nothing_planned
        self._planned_part = graphs.part(
            module, [outputs[number] for number in self._computed], name, with_effects=True
        )
        self._fixed = frozenset() if forward is None else forward.fixed
        saved_from = len(outputs) if forward is None else forward.results
        self._saved = [at for at, number in enumerate(self._computed) if number >= saved_from]
        written_back = 0 if forward is None else forward.written_back
        self._callers = [at for at, number in enumerate(self._computed) if written_back <= number < saved_from]
        writes = not is_backward and (forward is None or forward.writes)
        self._plan = make(GraphRole(name, is_backward, bool(self._saved), writes))
        self._plans_made = 0
        self._takes_any_size = any(not _is_tensor_of_known_size(node.meta.get("val")) for node in arguments)
        self._calls: Counter[Any] = Counter()  # by sizes, of a graph that takes any
        self._bound: list[_Bound] = []
        # Alive while the saved results of the last call are referenced.
        self._holder: weakref.ref[torch.Tensor] | None = None
        self._alone = threading.Lock() if self._saved else nullcontext()

    def __call__(self, *arguments: Any) -> Any:
        if compat.checks_custom_operations():  # a mode of PyTorch's around the first call of a graph
            with compat.no_dispatch_modes():
                return self(*arguments)
        is_first = self._is_backward and not self._places.are_known
        if self._is_nothing_planned or is_first or compat.count_dispatch_modes():
            return self._whole(*arguments)
        if any(arguments[number].is_conj() or arguments[number].is_neg() for number in self._gradients):
            return self._whole(*arguments)
        with self._alone:
            if self._holder is not None and self._holder() is not None:
                return self._whole(*arguments)
            sizes = _sizes(arguments) if self._takes_any_size else None
            bound = next((known for known in self._bound if known.fits(arguments, sizes)), None)
            if bound is None:
                if not self._is_worth_a_plan(sizes):
                    return self._whole(*arguments)
                bound = self._bind(arguments, sizes)
            if bound.is_due():
                bound = self._bind(arguments, sizes, instead_of=bound)
            if bound.plan is None:
                return self._whole(*arguments)
            try:
                planned_results = self._own_results(bound, bound.plan, arguments)
            except NoMemoryForResults as error:
                bound.plan.failed(error)
                bound.plan, planned_results = None, []
            if bound.plan is None:  # only here is the memory free that the failed run has already taken
                return self._whole(*arguments)
        values = (None, *arguments, *planned_results)
        results = [values[number] for number in self._sources]
        if self._others:
            for number, value in zip(self._others, self._make_views(*arguments), strict=True):
                results[number] = value
        return results

    def _is_worth_a_plan(self, sizes: Any) -> bool:
        """Planning takes long: a graph that takes any sizes is planned for those that come often."""
        if self._plans_made >= _MOST:
            return False
        if not self._takes_any_size:
            return True
        if len(self._calls) > _REMEMBERED:
            self._calls.clear()
        self._calls[sizes] += 1
        return self._calls[sizes] >= _OFTEN

    def _own_results(self, bound: _Bound, plan: GraphPlan, arguments: tuple[Any, ...]) -> list[Any]:
        if not plan.in_graph:
            return plan.run([_plain(value) for value in arguments if isinstance(value, torch.Tensor)])
        # Saved results stay in the graph's memory: the backward pass reads them there.
        results = list(plan.run([value for value in arguments if isinstance(value, torch.Tensor)]))
        if not self._saved:
            return results
        for at in self._callers:
            results[at] = results[at].clone()
        if not bound.saved:  # the same on every replay
            bound.saved = {_place(results[at]) for at in self._saved}
            self._places.saved = set().union(*(known.saved for known in (bound, *self._bound)))
        first = self._saved[0]
        results[first] = results[first].detach()  # a new object on every call, alive while it is referenced
        self._holder = weakref.ref(results[first])
        return results

    def _bind(self, arguments: tuple[Any, ...], sizes: Any, instead_of: _Bound | None = None) -> _Bound:
        """Plan the graph for these arguments; ``instead_of``: look for a better plan than this one's."""
        tensors = {number: value for number, value in enumerate(arguments) if isinstance(value, torch.Tensor)}
        if self._fixed:
            self._places.fixed = {
                _place(tensors[number]) for number in self._fixed & tensors.keys() if tensors[number].is_cuda
            }
        fixed = {number for number, value in tensors.items() if value.is_cuda and _place(value) in self._places}
        if instead_of is not None:  # the better plan may be the same run, which reads the same arguments in place
            fixed = {*instead_of.in_place}
        planner = (None if instead_of is None else instead_of.planner) or self._plan
        self._plans_made += instead_of is None
        plain_arguments = tuple(_plain(value, in_place=n in fixed) for n, value in enumerate(arguments))
        plan = planner(self._planned_part, plain_arguments)
        bound = _Bound(plan, arguments, sorted(fixed), sizes)
        self._places.are_known = True
        self._bound = [bound, *[other for other in self._bound if other is not instead_of][: _RECENT - 1]]
        return bound


class _Bound:
    """A plan (None: the graph runs unplanned), with the properties that its arguments must have.

    Dynamo's guards have already checked shapes and types, and PyTorch's modes. But a graph for any sizes is planned for
    some, and ``in_place`` are the numbers of tensors that a CUDA graph reads in place.
    """

    def __init__(self, plan: GraphPlan | None, arguments: tuple[Any, ...], in_place: Sequence[int], sizes: Any) -> None:
        self.plan, self.in_place, self._sizes = plan, in_place, sizes
        # Another thread may call at the same time: ``count`` returns each number once.
        self._calls = itertools.count(1)
        later = None if plan is None else plan.later
        self._due: int = 0 if later is None else later[0]
        self.planner: Planner | None = None if later is None else later[1]
        self.saved: set[int] = set()  # addresses of saved results, once they exist
        self._same_addresses = compat.arguments_lie_at({number: arguments[number].data_ptr() for number in in_place})

    def is_due(self) -> bool:
        """Whether looking for a better plan pays on this call; ask once per call."""
        return self._due > 0 and next(self._calls) == self._due

    def fits(self, arguments: tuple[Any, ...], sizes: Any) -> bool:
        return bool(sizes == self._sizes) and self._same_addresses(arguments)


def _is_tensor_of_known_size(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _sizes(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The forms of tensors, and the numbers, among a graph's arguments."""
    return tuple((value.shape, value.stride()) if isinstance(value, torch.Tensor) else value for value in arguments)


def _plain(value: Any, *, in_place: bool = False) -> Any:
    """The same tensor without gradients, which are not part of this graph; a plan reads a parameter in place."""
    if not isinstance(value, torch.Tensor):
        return value
    if in_place or type(value) is torch.nn.Parameter:
        return torch.nn.Parameter(value.detach(), requires_grad=False)
    return value.detach() if value.requires_grad else value


def _place(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()
