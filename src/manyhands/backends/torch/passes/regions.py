"""Compiles runs of small operations of a trace into one task each, and keeps independent operations apart.

Lanes run independent operations side by side; a compiler makes one kernel of operations that follow each other. To have
both, parts of the trace (regions) are compiled, and each is then a task like any other. A region starts when all of its
inputs are ready, and its results are ready when all of it is done. So a careless choice makes lanes useless: in

    p = sin(a @ b)           q = cos(c @ d)          r = p + q

a region of sin, cos and the sum would make ``p``, if something else uses it, wait for ``c @ d``. The rule: each
operation has a set, the large operations (products, convolutions, in-place writes) that must be done before it.
Connected operations with the same set could not have started at different times: they become one region. Here sin, cos
and the sum have three different sets. A small operation whose only users are in one region joins it, as nothing else
waits for it: if only the sum uses ``p`` and ``q``, all three are one region. (An operation with only its views is not a
region yet: each of them may join another.) Regions never depend on each other in a cycle: along every path the sets
only grow.

Some operations are split first, so that their small parts can join regions: batch normalisation updates its statistics
as a side effect (:mod:`.batch_norm`), activations overwrite their arguments (:mod:`.out_of_place`), convolutions have
biases (:mod:`.conv_bias`). Single casts whose inputs exist from the start are batched instead (:mod:`.small_together`):
a compiler would generate a kernel for each, because their sizes differ. Finally, convolutions get their fastest ways
(:mod:`.convolutions`), which no compiler looks for.

The other extreme is one region for everything (:func:`fuse_whole`): nothing is left for lanes, but the compiler sees
the whole function and chooses layouts for it. Which of the two is better is measured.
"""

from __future__ import annotations

import hashlib
import heapq
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from manyhands.addresses import Span, joined
from manyhands.amounts import counted
from manyhands.backends.torch import compat
from manyhands.backends.torch.addresses import reach
from manyhands.backends.torch.capture.trace import Step, Trace, is_check
from manyhands.backends.torch.compat import FakeTensorMode
from manyhands.backends.torch.passes.batch_norm import make_pure
from manyhands.backends.torch.passes.conv_bias import take_out_biases
from manyhands.backends.torch.passes.convolutions import tune_convolutions
from manyhands.backends.torch.passes.fusible import is_small, is_view, tensors, written_in_place
from manyhands.backends.torch.passes.out_of_place import make_out_of_place
from manyhands.backends.torch.passes.small_together import cast_together
from manyhands.errors import CannotFuse
from manyhands.schedule.task import needs

_CALLS = 20_000  # assumed calls of a compiled function, in which tuning its convolutions has to pay off
_LEAST = 2  # operations in a region that compute something
# How far results may be from plain execution's if there are no exact results to compare with (run/float64.py). Then
# values that are zero up to noise (the gradient of a bias before a BatchNorm) count too. Wrong results differ by about
# one.
_CLOSE, _CLOSE_IN_LOW_PRECISION = 5e-3, 5e-2
_LOW = (torch.bfloat16, torch.float16)

_aten = torch.ops.aten

# Compiles a region's graph to a function, given tensors like its inputs.
Compiler = Callable[[GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]


class Region:
    """A compiled part of a trace, called like an operation."""

    def __init__(self, words: str, digest: str, compiled: Callable[..., Any], *, is_whole: bool = False) -> None:
        self.is_whole = is_whole  # the whole trace: measuring it separately gains nothing
        # A description and the digest of its code: the key under which its cost is stored.
        self.words = f"{words} [{digest}]"
        self.__name__ = f"fused_{digest}"
        self.__module__ = __name__
        self._compiled = compiled

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self._compiled(*tensors)

    def __str__(self) -> str:
        return self.words


@dataclass
class _Unit:
    """A region with its compiler, or one step."""

    steps: list[int]
    compiler: Compiler | None = None
    needs: set[int] = field(default_factory=set)
    is_whole: bool = False


def fuse(trace: Trace, compiler: Compiler | None = None, biases_out_on: Sequence[str] = ("cuda",)) -> Trace:
    """The same function with regions compiled, by Inductor unless another compiler is given.

    Biases are taken out of convolutions on the kinds of devices ``biases_out_on``. :class:`CannotFuse` says why there
    are no regions, or why they cannot be compiled here.
    """
    _must_be_alone()
    as_written, trace = trace, take_out_biases(make_out_of_place(make_pure(trace)), biases_out_on)
    wanted, compiler = needs(trace.tasks), compiler or inductor
    units = _units(trace, wanted, compiler)
    if not any(unit.compiler is compiler for unit in units):
        raise CannotFuse("no two small operations follow each other")
    fused = cast_together(trace.rewritten(_Writer(trace).write(_ordered(units, wanted))))
    fused, tuned = tune_convolutions(fused, _CALLS)
    fused.passes += [f"convolutions: {tuned}"] if tuned is not None else []
    return _described(fused, as_written)


def fuse_whole(trace: Trace, compiler: Compiler | None = None) -> Trace:
    """The same function compiled as one task; :class:`CannotFuse` says why it cannot be compiled.

    The compiled code also makes the function's writes, such as a training step's updates of its weights.
    """
    _must_be_alone()
    as_written = trace
    trace = make_pure(trace.unsplit or trace)
    _must_be_compilable(trace)
    graph = _Writer(trace).write([_Unit([*range(len(trace.steps))], compiler or inductor, is_whole=True)])
    fused = _described(trace.rewritten(graph), as_written)
    written = trace.written_memories() & fused.callers_memories()
    for step in fused.steps:  # the only one: its schema does not say what it writes to
        step.task = replace(step.task, writes=step.task.writes | written)
    return fused


def _described(fused: Trace, as_written: Trace) -> Trace:
    """Record the original trace, the number of compiled regions, and how close the results have to be."""
    fused.as_written = as_written
    fused.compiled_regions = sum(isinstance(step.node.target, Region) for step in fused.steps)
    low = any(value.dtype in _LOW for node in as_written.storages for value in tensors(node))
    fused.close = _CLOSE_IN_LOW_PRECISION if low else _CLOSE
    return fused


def _must_be_alone() -> None:
    if compat.count_dispatch_modes():
        raise CannotFuse("a dispatch mode is active (virtual devices?): PyTorch compiles nothing while one is")


def _must_be_compilable(trace: Trace) -> None:
    """Refuse traces that cannot be one compiled task: on several devices, with random numbers or checks of values."""
    if len({step.task.device for step in trace.steps}) > 1 or any(step.task.kind != "compute" for step in trace.steps):
        raise CannotFuse("the whole function is not compiled: it runs on several devices")
    if any(step.task.token is not None for step in trace.steps):
        raise CannotFuse("the whole function is not compiled: compiled code would draw different random numbers")
    if any(is_check(step.node) for step in trace.steps):
        raise CannotFuse("the whole function is not compiled: it checks values on the way")
    if sum(not step.task.is_view for step in trace.steps) < _LEAST:
        raise CannotFuse("the whole function is not compiled: it is a single operation")
    if _writes_shared_memory(trace):
        raise CannotFuse("the whole function is not compiled: it writes to memory that two of its tensors share")


def _writes_shared_memory(trace: Trace) -> bool:
    """Whether tensors from outside overlap where the trace writes: compiled code takes each for memory of its own.

    Tensors may lie in one storage side by side, as the weights of an LSTM on a GPU do.
    """
    written, spans = trace.written_memories(), dict[int, list[Span]]()
    for node in [*trace.inputs, *trace.constants]:
        tensor = trace.constant(node) if node.op == "get_attr" else node.meta.get("val")
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            offset = int(tensor.storage_offset()) * tensor.element_size()
            start = tensor.data_ptr() if node.op == "get_attr" else offset
            span = Span(start, start + reach(tensor) * tensor.element_size())
            for memory in trace.storages[node] & written:
                spans.setdefault(memory, []).append(span)
    return any(len(joined(beside)) < len(beside) for beside in spans.values())


# Which operations become a region


def _units(trace: Trace, wanted: Sequence[set[int]], compiler: Compiler) -> list[_Unit]:
    steps = trace.steps
    written = written_in_place(trace)
    small = [is_small(step, written) for step in steps]
    before = [0] * len(steps)  # sets of large operations, as the bits of a number
    for index, earlier in enumerate(wanted):
        for other in earlier:
            before[index] |= before[other] | (0 if small[other] else 1 << other)
    member = list(range(len(steps)))

    def root(step: int) -> int:
        while member[step] != step:
            member[step] = step = member[member[step]]
        return step

    for index, earlier in enumerate(wanted):
        for other in earlier:
            same = small[index] and small[other] and before[index] == before[other]
            if same and steps[index].task.device == steps[other].task.device:
                member[root(index)] = root(other)
    _dissolve_few(trace, member, root)
    _take_in(trace, wanted, small, member, root)
    regions = [_without_outside_views(trace, members) for members in _sets(member, root) if len(members) > 1]
    regions = [members for members in regions if _computing(trace, members) >= _LEAST]
    alone = sorted(set(range(len(steps))).difference(*regions))
    return [*(_Unit(members, compiler) for members in regions), *(_Unit([step]) for step in alone)]


def _sets(member: Sequence[int], root: Callable[[int], int]) -> list[list[int]]:
    sets: dict[int, list[int]] = {}
    for index in range(len(member)):
        sets.setdefault(root(index), []).append(index)
    return list(sets.values())


def _computing(trace: Trace, members: Sequence[int]) -> int:
    """How many of these operations are not views."""
    return sum(not is_view(trace.steps[member]) for member in members)


def _dissolve_few(trace: Trace, member: list[int], root: Callable[[int], int]) -> None:
    """Dissolve groups of one operation and its views, which are no regions: other regions may take them in."""
    for members in _sets(member, root):
        if len(members) > 1 and _computing(trace, members) < _LEAST:
            for step in members:
                member[step] = step


def _take_in(
    trace: Trace, wanted: Sequence[set[int]], small: Sequence[bool], member: list[int], root: Callable[[int], int]
) -> None:
    """Add a single small operation to a region if all of its users are in that region."""
    sizes = Counter(map(root, range(len(member))))
    followers: list[set[int]] = [set() for _ in wanted]
    for index, earlier in enumerate(wanted):
        for other in earlier:
            followers[other].add(index)
    outputs = {value for value in trace.outputs if isinstance(value, Node)}
    for index in range(len(member) - 1, -1, -1):
        step = trace.steps[index]
        if not small[index] or sizes[root(index)] > 1 or outputs & set(step.nodes) or not followers[index]:
            continue
        homes = {root(follower) for follower in followers[index]}
        home = homes.pop()
        if homes or not small[home] or trace.steps[home].task.device != step.task.device:
            continue
        member[index] = home
        sizes[home] += 1


def _without_outside_views(trace: Trace, members: list[int]) -> list[int]:
    """Omit views of outside tensors that are used outside: a region must not return views of its arguments."""
    left = list(members)
    while True:
        inside = {node for step in left for node in trace.steps[step].nodes}
        computed = {
            memory for step in left if not is_view(trace.steps[step]) for memory in trace.steps[step].task.writes
        }
        remaining = [
            step
            for step in left
            if not is_view(trace.steps[step])
            or not any(_escapes(node, inside) for node in trace.steps[step].nodes)
            or _memories(trace.steps[step]) <= computed
        ]
        if len(remaining) == len(left):
            return remaining
        left = remaining


def _escapes(node: Node, inside: set[Node]) -> bool:
    return any(user not in inside for user in node.users)


def _memories(step: Step) -> set[int]:
    return {compat.memory_id(value) for node in step.nodes for value in tensors(node)}


def _ordered(units: list[_Unit], wanted: Sequence[set[int]]) -> list[_Unit]:
    """The units in topological order, and otherwise in program order."""
    unit_of = {step: number for number, unit in enumerate(units) for step in unit.steps}
    followers: list[set[int]] = [set() for _ in units]
    for number, unit in enumerate(units):
        unit.needs = {unit_of[other] for step in unit.steps for other in wanted[step]} - {number}
        for other in unit.needs:
            followers[other].add(number)
    missing = [len(unit.needs) for unit in units]
    ready = [(unit.steps[0], number) for number, unit in enumerate(units) if not missing[number]]
    heapq.heapify(ready)
    ordered: list[_Unit] = []
    while ready:
        _, number = heapq.heappop(ready)
        ordered.append(units[number])
        for follower in followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (units[follower].steps[0], follower))
    assert len(ordered) == len(units), "regions in a circle"
    return ordered


# The graph with its regions


class _Writer:
    """Writes the units into a new graph, and compiles the regions among them."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._graph = trace, Graph()
        self._new: dict[Node, Node] = {}
        self._regions: dict[Any, Region] = {}  # by code and inputs: nets repeat the same blocks

    def write(self, units: Sequence[_Unit]) -> Graph:
        for node in self._trace.inputs + self._trace.constants:
            self._copy(node, self._graph, self._new)
        for unit in units:
            if unit.compiler is not None:
                self._region([node for step in unit.steps for node in self._trace.steps[step].nodes], unit)
            else:
                for node in self._trace.steps[unit.steps[0]].nodes:
                    self._copy(node, self._graph, self._new)
        self._graph.output(
            [self._new[output] if isinstance(output, Node) else output for output in self._trace.outputs]
        )
        return self._graph

    def _copy(self, node: Node, graph: Graph, new: dict[Node, Node]) -> None:
        new[node] = graph.node_copy(node, new.__getitem__)

    def _region(self, nodes: Sequence[Node], unit: _Unit) -> None:
        inside = set(nodes)
        inputs = list(
            dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
        )
        results = [node for node in nodes if isinstance(node.meta.get("val"), torch.Tensor) and _escapes(node, inside)]
        region = self._compiled(nodes, inputs, results, unit)
        call = self._graph.call_function(region, tuple(self._new[source_node] for source_node in inputs))
        call.meta["val"] = tuple(node.meta["val"] for node in results)
        for number, node in enumerate(results):
            self._new[node] = self._graph.call_function(operator.getitem, (call, number))
            self._new[node].meta["val"] = node.meta["val"]

    def _compiled(self, nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node], unit: _Unit) -> Region:
        assert unit.compiler is not None
        graph, new = Graph(), dict[Node, Node]()
        for number, node in enumerate(inputs):
            new[node] = graph.placeholder(f"input_{number}")
        for number, node in enumerate(nodes):
            if node.target is _aten._foreach_copy_.default and not node.kwargs:
                _copy_one_by_one(graph, map_arg(node.args, new.__getitem__))
                continue
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].name = f"value_{number}"
        graph.output(tuple(new[node] for node in results))
        module = GraphModule({}, graph)
        metas = [node.meta["val"] for node in inputs]
        key = module.code, *((tuple(meta.shape), meta.stride(), meta.dtype, str(meta.device)) for meta in metas)
        if key not in self._regions:
            steps = [self._trace.steps[number] for number in unit.steps]
            names = dict.fromkeys(step.task.name.strip("_") for step in steps if not is_view(step))
            words = f"fused {counted(len(steps), 'operation')}" if unit.is_whole else " ".join(["fused", *names])
            digest = hashlib.sha256(repr(key).encode()).hexdigest()[:8]
            compiled = unit.compiler(module, metas)
            if unit.is_whole:
                compiled = _in_form(compiled, [node.meta["val"] for node in results])
            self._regions[key] = Region(words, digest, compiled, is_whole=unit.is_whole)
        return self._regions[key]


def _copy_one_by_one(graph: Graph, arguments: Any) -> None:
    """The copies of ``_foreach_copy_``: compiled code writes each value where it computes it.

    As one operation they would be a kernel of their own, which reads every value again.
    """
    for target, source in zip(*arguments[:2], strict=True):
        graph.call_function(_aten.copy_.default, (target, source))


def _in_form(compiled: Callable[..., Any], metas: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Return results with the function's strides: a caller may look at them."""
    forms = [(tuple(meta.shape), meta.stride()) for meta in metas]

    def laid_out(result: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        if result.stride() == stride:
            return result
        return torch.empty_strided(shape, stride, dtype=result.dtype, device=result.device).copy_(result)

    def run(*inputs: torch.Tensor) -> Any:
        return [laid_out(result, *form) for result, form in zip(compiled(*inputs), forms, strict=True)]

    return run


def inductor(module: GraphModule, metas: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Inductor's code for a graph without gradients.

    The caller's autocast does not count: casts are operations of the graph.
    """
    with FakeTensorMode():
        inputs = [
            torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=meta.device) for meta in metas
        ]
    try:
        # Lanes divide the threads: how many a region may use is known when it runs, not when it is compiled. And
        # folding turns x + 0 into x itself: a region would return its argument as if it were a new result.
        how = {"cpp.dynamic_threads": True, "joint_graph_constant_folding": False}
        with torch.no_grad(), compat.no_autocast():
            return compat.inductor_compile(module, inputs, how)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise CannotFuse(f"{type(error).__name__}: {text[0] if text else 'no reason given'}") from error
