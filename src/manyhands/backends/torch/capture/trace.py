"""From a PyTorch function to tasks: every ATen operation, with the memories it reads and writes.

Graphs come from ``aot_autograd`` (:mod:`..dynamo.graphs`), or from ``make_fx`` (:mod:`.whole`), both with fake tensors:
nothing is computed. Tensors that a function takes from outside its arguments (closures, a module's parameters) become
constants of the trace, read anew at every run.

Memory is identified by the storages of the fake results: a view shares its base's, an in-place operation writes its
argument's. Tensors from outside share memory where their bytes overlap, as two ``from_numpy`` of one array do.

Some operations return nothing and only check something (``cholesky`` calls ``_linalg_check_errors``). They are tasks,
too.
"""

from __future__ import annotations

import bisect
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from manyhands.addresses import join
from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.reasons import FROM_SHAPE
from manyhands.backends.torch.compat import tensors_in, tree_leaves
from manyhands.errors import CannotTrace
from manyhands.schedule.graph import Kind, Task

_aten, _profiler = torch.ops.aten, torch.ops.profiler
# Operations that in training write to arguments although their schema does not say so: BatchNorm's statistics.
_HIDDEN_WRITES: dict[Any, tuple[int, ...]] = {
    _aten.native_batch_norm.default: (3, 4),
    _aten.cudnn_batch_norm.default: (3, 4),
    _aten.miopen_batch_norm.default: (3, 4),
}
# Views whose schema does not say so: PyTorch uses them where the base is not used again.
HIDDEN_VIEWS = (
    _aten._unsafe_view.default,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
    _aten.unsafe_chunk.default,
)
# Results of attention, by name, that hold the state of its random numbers.
_RANDOM_STATES = ("philox_seed", "philox_offset", "rng_state", "unused", "debug_attn_mask")
# Operations that raise if values are not as they should be.
_CHECKS = (
    _aten._linalg_check_errors,
    _aten._assert_async,
    _aten._assert_scalar,
    _aten._functional_assert_async,
    _aten._functional_assert_scalar,
)
# Without effect in a run: checks with the same outcome in every call of a signature, marks for the profiler.
_NEEDLESS = (
    _aten._assert_tensor_metadata,
    _aten.sym_constrain_range,
    _aten.sym_constrain_range_for_size,
    _profiler._record_function_exit,
)


@dataclass
class TracedStep:
    """A task and the operations behind it: one, and the parts taken out of its several results."""

    nodes: list[Node]
    task: Task

    @property
    def node(self) -> Node:
        return self.nodes[0]


@dataclass
class Trace:
    """A captured graph: its steps in program order, its inputs and outputs."""

    module: GraphModule
    steps: list[TracedStep]
    inputs: list[Node]
    constants: list[Node]
    outputs: list[Any]
    storages: dict[Node, frozenset[int]] = field(repr=False, default_factory=dict)
    # How far results may differ from plain execution: another kernel may add in another order.
    close: float = 1e-5
    # The trace before operations were split for lanes, if some were: better for a single lane, and for a compiler.
    unsplit: Trace | None = field(repr=False, default=None)

    def constant(self, node: Node) -> Any:
        """The tensor from outside that a constant of the trace stands for."""
        return getattr(self.module, str(node.target))

    def constant_values(self) -> list[torch.Tensor]:
        return tensors_in([*map(self.constant, self.constants)])

    def memories_of(self, nodes: Iterable[object]) -> frozenset[int]:
        """All memories that these nodes are in; an output that is not a node is in none."""
        return frozenset[int]().union(*(self.storages[node] for node in nodes if isinstance(node, Node)))

    def callers_memories(self) -> frozenset[int]:
        """The memories of arguments and of tensors from outside: they exist before a run and stay after it."""
        return self.memories_of([*self.inputs, *self.constants])

    def written_memories(self) -> frozenset[int]:
        """The memories that some step writes to, new ones included."""
        return frozenset[int]().union(*(step.task.writes for step in self.steps))

    def written_inputs(self) -> list[int]:
        """The numbers of the arguments that some step writes to."""
        written = self.written_memories()
        return [number for number, node in enumerate(self.inputs) if self.storages[node] & written]

    def written_constants(self) -> list[torch.Tensor]:
        """The tensors from outside that some step writes to."""
        written = self.written_memories()
        return tensors_in([self.constant(node) for node in self.constants if self.storages[node] & written])

    def gpus(self) -> set[str]:
        """The names of the GPUs that steps run on."""
        return {step.task.device for step in self.steps if step.task.device.startswith("gpu")}

    @property
    def tasks(self) -> list[Task]:
        return [step.task for step in self.steps]

    def with_graph(self, graph: Graph) -> Trace:
        """The same function, with another graph over the same constants."""
        other = describe_graph(compat.graph_module(self.module, graph))
        other.close = self.close
        return other


def trace_of_graph(module: GraphModule) -> Trace:
    """The trace of a graph of ATen operations that returns a list; its dead code is removed."""
    _join_constants(module)
    _must_be_static(module)  # also unused nodes: the function may have caught the error of a value that it needs
    module.graph.eliminate_dead_code(is_impure_node=has_effects)
    return describe_graph(module)


def _join_constants(module: GraphModule) -> None:
    """Make one constant of all that stand for the same tensor: to a compiler each would be a tensor of its own."""
    first: dict[int, Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            constant = first.setdefault(id(getattr(module, str(node.target))), node)
            if constant is not node:
                node.replace_all_uses_with(constant)
                module.graph.erase_node(node)


def has_effects(node: Node) -> bool:
    """Whether an operation must run although its result is unused: it writes, checks, or draws random numbers."""
    if node.op in ("placeholder", "output"):
        return True
    schema = compat.schema(node.target)
    writes = schema is not None and schema.is_mutable
    draws = torch.Tag.nondeterministic_seeded in _tags(node)
    return writes or draws or node.target in _HIDDEN_WRITES or is_check(node) or _gives_nothing(node)


def is_check(node: Node) -> bool:
    """Whether an operation only raises if values are not as they should be."""
    return getattr(node.target, "overloadpacket", None) in _CHECKS


def _gives_nothing(node: Node) -> bool:
    """Whether an operation has neither a result nor a declared write: it can only be there for another effect."""
    schema = compat.schema(node.target)
    needless = getattr(node.target, "overloadpacket", None) in _NEEDLESS
    return schema is not None and not schema.returns and not schema.is_mutable and not needless


def _must_be_static(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if node.target is _aten._local_scalar_dense.default:
            raise CannotTrace("it reads a tensor's value as a Python number (.item()): leave it a tensor")
        sizes = [size for tensor in tensors_in(node.meta.get("val")) for size in tensor.shape]
        # That of x[mask] is not known; that of x[numbers] is.
        if torch.Tag.data_dependent_output in _tags(node) or not all(isinstance(size, int) for size in sizes):
            raise CannotTrace(f"the shape of the result of {_operation(node)} depends on values: {FROM_SHAPE}")
        if _gives_nothing(node) and not is_check(node):
            raise CannotTrace(f"{_operation(node)} has no result, only an effect: trying plans would repeat it")
        results = getattr(module, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
        if any(isinstance(value, torch.Generator) for value in [results, *node.kwargs.values()]):
            raise CannotTrace("it draws random numbers from a torch.Generator: trying plans would draw from it too")
        for value in tensors_in(results):
            if value.layout is not torch.strided:
                raise CannotTrace(f"{_operation(node)} gives a tensor of {value.layout}: its memory is not known")


def _tags(node: Node) -> Sequence[Any]:
    return getattr(node.target, "tags", ())


def _operation(node: Node) -> str:
    schema = compat.schema(node.target)
    return str(node.target) if schema is None else schema.name.partition("::")[2]


def describe_graph(module: GraphModule) -> Trace:
    """The tasks of a traced graph, with the memories that they touch."""
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    constants = [node for node in nodes if node.op == "get_attr"]
    for node in constants:
        node.meta.setdefault("val", getattr(module, str(node.target)))
    storages: dict[Node, frozenset[int]] = _from_outside(constants, module)
    handles: dict[Any, frozenset[int]] = {}
    outside: dict[int, frozenset[int]] = {}
    for number, node in enumerate(nodes):
        if node in storages:
            continue
        shared = _aliases_of(node, storages)
        # A view has no memory; this number stands for the view itself, so that its users come after it. One of several
        # views (split, unbind) has the number of the whole.
        part = node.target is operator.getitem
        handles[node] = handles.get(node.args[0], frozenset()) if part else frozenset({number} if shared else ())
        memories = frozenset[int]().union(*(outside.get(storage, {storage}) for storage in _storages(node)))
        known = frozenset(memory for memory in shared if memory < 0)
        if known and _is_view(node):
            outside.update(dict.fromkeys(memories, known))  # the fake storage of a tensor from outside
            memories = known
        storages[node] = memories | shared | handles[node]
    steps: list[TracedStep] = []
    step_of: dict[Node, TracedStep] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem and node.args[0] in step_of:
            step_of[node] = step_of[node.args[0]]
            step_of[node].nodes.append(node)
            continue
        step_of[node] = TracedStep([node], _task(node, storages))
        steps.append(step_of[node])
    output = next(node for node in nodes if node.op == "output").args[0]
    return Trace(module, steps, inputs, constants, list(output), storages)


def _task(node: Node, storages: dict[Node, frozenset[int]]) -> Task:
    read = _memories(node.all_input_nodes, storages)
    written = _writes_of(node, storages)
    memories = storages[node] | frozenset().union(
        *(storages[user] for user in node.users if user.target is operator.getitem)
    )
    fresh = memories - read
    device, kind = _place(node)
    random = torch.Tag.nondeterministic_seeded in _tags(node) and not _drops_nothing(node)
    return Task(
        name=_operation(node),
        reads=read,
        writes=written | fresh,
        device=device,
        kind=kind,
        token=f"random numbers of {device}" if random else None,
        detail=_shape(node.meta.get("val")),
        module=module_path(node),
        is_view=_is_view(node) and not written,
    )


def _drops_nothing(node: Node) -> bool:
    """Whether an operation draws random numbers only for dropout, and dropout is 0: mostly attention."""
    return any(argument.name == "dropout_p" and value == 0 for argument, value in _arguments(node))


def meaningless_outputs(trace: Trace) -> frozenset[int]:
    """The numbers of outputs whose values are uninitialised memory, so that they must not be compared.

    Attention passes the state of its random numbers to its backward pass, and without dropout it draws none.
    """
    return frozenset(number for number, value in enumerate(trace.outputs) if _is_unused_state(value))


def _is_unused_state(value: Any) -> bool:
    while isinstance(value, Node) and value.target in (_aten.detach.default, _aten.alias.default):
        value = value.args[0]
    if not isinstance(value, Node) or value.target is not operator.getitem:
        return False
    source, part = value.args
    if not isinstance(source, Node) or not isinstance(part, int) or not _drops_nothing(source):
        return False
    schema = compat.schema(source.target)
    return schema is not None and schema.returns[part].name in _RANDOM_STATES


def module_path(node: Node) -> str:
    """The path in its model of the module that an operation belongs to: ``layers.0.attention``; empty if unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str([*stack.values()][-1][0]) if stack else ""
    return re.sub(r"^\w\[[^\]]*\]\.?", "", path)  # G['net'].layers.0


def _shape(value: Any) -> str:
    """The shape of the first result, as pictures show it: 64x128."""
    return next(("x".join(map(str, tensor.shape)) for tensor in tensors_in(value)), "")


def _arguments(node: Node) -> list[tuple[Any, Any]]:
    return compat.arguments(node.target, node.args, node.kwargs)


def _writes_of(node: Node, storages: dict[Node, frozenset[int]]) -> frozenset[int]:
    """The memories of the arguments that an operation writes to, according to its schema."""
    known = _arguments(node)
    written = [value for argument, value in known if argument.alias_info is not None and argument.alias_info.is_write]
    if node.target in _HIDDEN_WRITES and node.args[5]:
        written += [known[number][1] for number in _HIDDEN_WRITES[node.target]]
    return _memories(written, storages)


def _aliases_of(node: Node, storages: dict[Node, frozenset[int]]) -> frozenset[int]:
    """The memories of arguments that the result is a view of, or is, whether the schema says so or not."""
    if node.target is operator.getitem:
        return frozenset()
    known = _arguments(node)
    shared = [value for argument, value in known if argument.alias_info is not None]
    shared += [known[0][1]] if node.target in HIDDEN_VIEWS else []
    memories = _memories(shared, storages)
    if memories or node.op != "call_function":
        return memories
    of_result = _storages(node)
    return _memories([source for source in node.all_input_nodes if of_result & storages[source]], storages)


def _memories(values: object, storages: dict[Node, frozenset[int]]) -> frozenset[int]:
    """The memories of all nodes among arguments."""
    return frozenset[int]().union(*(storages[leaf] for leaf in tree_leaves(values) if isinstance(leaf, Node)))


def _is_view(node: Node) -> bool:
    """Whether all results of an operation are in the memory of its arguments."""
    schema = compat.schema(node.target)
    declared = schema is not None and all(result.alias_info is not None for result in schema.returns)
    return declared or node.target in HIDDEN_VIEWS


def _from_outside(constants: Sequence[Node], module: GraphModule) -> dict[Node, frozenset[int]]:
    """The memories of tensors from outside, by address: tensors whose spans overlap share one."""
    values = {node: getattr(module, str(node.target)) for node in constants}
    spans = {node: span for node, value in values.items() if (span := compat.span_of(value)) is not None}
    places = join(spans.values())
    memories: dict[Node, frozenset[int]] = {node: frozenset() for node in constants}
    for node, span in spans.items():
        place = places[bisect.bisect_right(places, span.start, key=lambda span_before: span_before.start) - 1]
        memories[node] = frozenset({-place.start - 1})  # a negative number: never the same as a fake storage's
    return memories


def _storages(node: Node) -> frozenset[int]:
    return frozenset(map(compat.memory_id, tensors_in(node.meta.get("val"))))


def _place(node: Node) -> tuple[str, Kind]:
    """Device and kind of lane: a copy between devices goes to the copy lane of its GPU."""
    results = tensors_in(node.meta.get("val"))
    values = [source.meta.get("val") for source in node.all_input_nodes]
    sources = [value for value in values if isinstance(value, torch.Tensor)]
    target = results[0].device if results else sources[0].device if sources else torch.device("cpu")
    source = next((value.device for value in sources if value.dim() or value.device.type != "cpu"), target)
    if node.target in (_aten._to_copy.default, _aten.copy_.default) and sources:
        if source.type != target.type:
            return (_name(source), "copy out") if source.type == "cuda" else (_name(target), "copy in")
        if sources[-1].device.type == target.type and sources[-1].device != target:
            return _name(target), "copy"  # from one GPU to another: a lane of the target
    return _name(target), "compute"


def _name(device: torch.device) -> str:
    if device.type not in ("cpu", "cuda"):
        raise CannotTrace(f"it computes on {device}: only CPUs and CUDA's GPUs are planned")
    if device.type == "cpu":
        return "cpu" if device.index is None else f"virtual:{device.index}"
    return f"gpu:{device.index or 0}"
