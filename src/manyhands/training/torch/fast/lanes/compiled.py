"""Side lanes for a compiled step: weight gradients in parallel with the compiled backward pass.

A dispatch mode does not see what a compiler fuses, and a compiler decides itself when to reuse memory. So a pass adds
the lanes to the graph before it is compiled:

    main chain                                      after the pass

    dx, dw = convolution_backward(g, x, w)          dw = convolution_on_lane(lane 1, g, x, w)
    ... uses of dx ...                              dx = convolution_backward(g, x, w)       (its input alone)
    return dw.to(float32), ...                      ... uses of dx ...
                                                    join_lanes([dw, ...], [g, x, w, ...])
                                                    return dw, ...

``convolution_on_lane`` forks off its lane where it stands in the graph. ``join_lanes`` declares that it writes to all
results, so that nothing reads them earlier, and that it reads all inputs of the lanes, so that their memory is not
reused earlier. All of this is verified: every storage that a lane has read must be among the inputs of its join,
everything must be joined at the end, and the checker verifies the order of the issued work. Outside of
``with CompiledLanes(...)`` the operations run in program order.

A gradient moves if there are only casts, views and sums between it and the results of the backward pass. It is joined
at the end. Until then the compiler keeps all inputs of the lanes. If these are too large, the pass inserts earlier
joins, each for the oldest gradients, which are likely finished:

    dw1 = on_lane(g1, x1)     dw2 = on_lane(g2, x2)     join([dw1], [g1, x1])     dw3 = on_lane(g3, x3)     ...
"""

from __future__ import annotations

import hashlib
import inspect
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from manyhands.amounts import count_of
from manyhands.backends.torch import compat
from manyhands.errors import UnsafeSchedule
from manyhands.schedule.check import check
from manyhands.schedule.graph import Task
from manyhands.schedule.lanes import Lane, Schedule
from manyhands.schedule.recorded import Journal
from manyhands.training.torch.fast import operations
from manyhands.training.torch.fast.lanes.eager import StreamLanes

_aten = torch.ops.aten
_Memories = dict[int, torch.UntypedStorage]
_UNREAD = "results of side lanes are not joined: they might be read too early"

# The lanes of the current step. Not thread-local, because the backward pass runs in a thread of autograd.
_current: CompiledLanes | None = None


@dataclass
class _LaneCall:
    """Work on a side lane, and the marks after it in the journal and on the lane."""

    read: _Memories
    created: _Memories
    lane: int
    recorded_mark: int
    mark: Any


class CompiledLanes:
    """``with CompiledLanes(lanes, 2): loss.backward()``, for a loss that was compiled with :class:`MoveToSideLanes`."""

    def __init__(self, lanes: StreamLanes, count: int, *, device: str = "cpu") -> None:
        self._lanes, self._count = lanes, count
        self._described = [Lane(device, number=number) for number in range(count + 1)]
        self.schedule: Schedule | None = None
        self._begin()

    def _begin(self) -> None:
        self.moved: list[str] = []
        self._journal = Journal(self._described)
        self._calls: list[_LaneCall] = []  # not joined yet; their inputs are held until then

    def __enter__(self) -> CompiledLanes:
        global _current
        self._begin()
        _current = self
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        global _current
        _current = None
        left = self._calls
        self._join(left)
        self.schedule = self._journal.schedule()
        if kind is None:
            check(self.schedule)
            if left:
                raise UnsafeSchedule(_UNREAD)

    def call(self, lane: int, name: str, function: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Compute on a side lane, after all work issued to the main lane so far."""
        lane = (lane - 1) % self._count + 1
        read = _memories(inputs)
        self._journal.task(0, Task("main chain", writes=frozenset(read.keys() - self._read(self._calls))))
        self._journal.wait(lane, self._journal.mark(0))
        self._lanes.wait(lane, self._lanes.mark(0))
        with self._lanes.on(lane):
            results: list[torch.Tensor] = function()
        created = _memories(results)
        self._journal.task(lane, Task(name, frozenset(read), frozenset(created)))
        self.moved.append(name)
        self._calls.append(_LaneCall(read, created, lane, self._journal.mark(lane), self._lanes.mark(lane)))
        return results

    def join(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Let the main lane wait for the work that computes these results, and for no other work.

        ``inputs``: the tensors that the work reads; they must not have been freed before.
        """
        there = _memories(results).keys()
        joined = [call for call in self._calls if call.created.keys() & there]
        unread = {memory for call in joined for memory in call.created} - there
        read = self._read(joined)
        lost = read - _memories(inputs).keys()
        self._join(joined)
        if unread:
            raise UnsafeSchedule(_UNREAD)
        if lost:
            raise UnsafeSchedule(
                f"the compiler gave {len(lost)} of {count_of(len(read), 'input')} of side lanes as copies that it may "
                "use again while they are read"
            )

    def _join(self, joined: Sequence[_LaneCall]) -> None:
        for call in {call.lane: call for call in joined}.values():  # the last call of each lane
            self._journal.wait(0, call.recorded_mark)
            self._lanes.wait(0, call.mark)
        self._calls = [call for call in self._calls if call not in joined]
        # From here on the results may be read, and inputs that no other call reads may be overwritten.
        created = {memory for call in joined for memory in call.created}
        free = self._read(joined) - self._read(self._calls)
        self._journal.task(0, Task("join", writes=frozenset(created | free)))

    @staticmethod
    def _read(calls: Sequence[_LaneCall]) -> set[int]:
        return {memory for call in calls for memory in call.read}


def _memories(tensors: Sequence[torch.Tensor]) -> _Memories:
    return {compat.memory_id(tensor): tensor.untyped_storage() for tensor in tensors}


# The operations in the compiled graph

_library = torch.library.Library("manyhands", "FRAGMENT")
_library.define(
    "convolution_on_lane(int lane, ScalarType? dtype, Tensor gradient, Tensor input, Tensor weight, SymInt[]? bias, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, "
    "bool for_bias) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "product_on_lane(int lane, ScalarType? dtype, Tensor tensor, Tensor other) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "join_lanes(Tensor(a!)[] results, Tensor[] inputs) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)


def _weight_gradient(dtype: torch.dtype | None, *arguments: Any) -> list[torch.Tensor]:
    *convolution, for_bias = arguments
    gradients = _aten.convolution_backward.default(*convolution, [False, True, for_bias])[1 : 3 if for_bias else 2]
    return [gradient if dtype is None else gradient.to(dtype) for gradient in gradients]


def _product(dtype: torch.dtype | None, tensor: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    product = torch.mm(tensor, other)
    return [product if dtype is None else product.to(dtype)]


def _convolution_on_lane(lane: int, dtype: torch.dtype | None, *arguments: Any) -> list[torch.Tensor]:
    if _current is None:
        return _weight_gradient(dtype, *arguments)
    name = "convolution, weight and bias" if arguments[-1] else "convolution, weight"
    return _current.call(lane, name, lambda: _weight_gradient(dtype, *arguments), arguments[:3])


def _product_on_lane(lane: int, dtype: torch.dtype | None, *factors: torch.Tensor) -> list[torch.Tensor]:
    if _current is None:
        return _product(dtype, *factors)
    return _current.call(lane, "product, weight", lambda: _product(dtype, *factors), factors)


def _join_lanes(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    if _current is not None:
        _current.join(results, inputs)


_library.impl("convolution_on_lane", _convolution_on_lane, "CompositeExplicitAutograd")
_library.impl("product_on_lane", _product_on_lane, "CompositeExplicitAutograd")
_library.impl("join_lanes", _join_lanes, "CompositeExplicitAutograd")
torch.library.register_fake(
    "manyhands::convolution_on_lane", lambda lane, *arguments: _weight_gradient(*arguments), lib=_library
)
torch.library.register_fake("manyhands::product_on_lane", lambda lane, *arguments: _product(*arguments), lib=_library)
torch.library.register_fake("manyhands::join_lanes", lambda results, inputs: None, lib=_library)


_CustomGraphPass: Any = compat.custom_graph_pass()
_prims, _ops = torch.ops.prims, torch.ops.manyhands
# Operations that are allowed between a gradient and the results of the backward pass.
_ALLOWED_AFTER = {
    operator.getitem,
    _prims.convert_element_type.default,
    _aten._to_copy.default,
    _aten.permute.default,
    _aten.t.default,
    _aten.view.default,
    _aten.reshape.default,
    _aten.squeeze.dim,
    _aten.add.Tensor,
}


class MoveToSideLanes(_CustomGraphPass):  # type: ignore[misc]
    """Moves weight gradients to side lanes; for ``torch.compile``'s option ``post_grad_custom_post_pass``.

    About ``max_held`` bytes of the lanes' inputs are held; beyond that the main lane waits for the oldest work.
    Products of fewer than ``min_product`` multiplications stay on the main lane.
    """

    def __init__(self, max_held: int | None = None, min_product: int = 0) -> None:
        self._max_held, self._min_product = max_held, min_product

    def __call__(self, graph: Graph) -> None:
        if any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes):
            _move_to_side_lanes(graph, self._max_held, self._min_product)

    def uuid(self) -> bytes:
        """Part of Inductor's cache key: it changes with the options and with the code of these files."""
        sources = [inspect.getsource(module) for module in (operations, sys.modules[__name__])]
        return hashlib.sha256(repr((self._max_held, self._min_product, sources)).encode()).digest()


def _move_to_side_lanes(graph: Graph, max_held: int | None, min_product: int) -> None:
    output = next(node for node in graph.nodes if node.op == "output")
    results: list[Node] = []
    groups: list[_Group] = [_Group()]
    for node in list(graph.nodes):
        if node.target is _aten.convolution_backward.default and node.args[-1][1]:
            gradients, last = _move_convolution(graph, node, len(results) + 1)
        elif node.target is _aten.mm.default and _multiplications(node) >= min_product:
            gradients, last = _move_product(graph, node, len(results) + 1)
        else:
            continue
        results += gradients
        groups[-1].add(gradients)
        if max_held is not None and groups[-1].bytes > max_held / 2:
            # The previous group is joined only now: its lanes could run during all of this group.
            if len(groups) > 1:
                groups[-2].join(graph, last.next)
            groups.append(_Group())
    if not results:
        return
    for group in groups[-2:]:
        group.join(graph, output)
    later = {node for node in _after(results) if node.target is not _ops.join_lanes.default}
    for node in [node for node in graph.nodes if node in later]:
        output.prepend(node)
    graph.lint()


class _Group:
    """Results that are joined together, and the inputs that they are computed from."""

    def __init__(self) -> None:
        self.results: list[Node] = []
        self._inputs: dict[Node, None] = {}
        self.bytes = 0

    def add(self, gradients: list[Node]) -> None:
        self.results += gradients
        for node in gradients:
            for source in node.args[0].all_input_nodes:  # type: ignore[union-attr]
                if source not in self._inputs:
                    self._inputs[source] = None
                    value = source.meta["val"]
                    self.bytes += value.numel() * value.element_size()

    def join(self, graph: Graph, before: Node) -> None:
        if self.results:
            with graph.inserting_before(before):
                graph.call_function(_ops.join_lanes.default, (self.results, list(self._inputs)))


def _move_convolution(graph: Graph, node: Node, lane: int) -> tuple[list[Node], Node]:
    """Move the gradients of weight and bias to a lane, unless the backward pass needs them; the input's stays.

    Returns the moved gradients, and the last operation that replaces the old one. The lane forks off before the
    gradient of the input, so that it does not wait for it.
    """
    arguments: Any = node.args
    *arguments_before, (for_input, _, for_bias) = arguments
    parts: dict[Any, Node] = {user.args[1]: user for user in node.users}
    wanted = [parts[number] for number in (1, 2) if number in parts]
    if 1 not in parts or not all(node_after.target in _ALLOWED_AFTER for node_after in _after(wanted)):
        return [], node
    dtype = _common_cast(wanted)
    with graph.inserting_before(node):
        arguments_on_lane = (lane, dtype, *arguments_before, for_bias and 2 in parts)
        last = on_lane = graph.call_function(_ops.convolution_on_lane.default, arguments_on_lane)
        if for_input and 0 in parts:
            last = graph.call_function(node.target, (*arguments_before, [True, False, False]))  # type: ignore[arg-type]
            last.meta["val"] = (node.meta["val"][0], None, None)
            parts[0].replace_input_with(node, last)
    gradients = _replace_results(graph, wanted, on_lane, dtype)
    graph.erase_node(node)
    return gradients, gradients[-1] if last is on_lane else last


def _multiplications(node: Node) -> int:
    left, right = (factor.meta["val"] for factor in node.all_input_nodes[:2])
    return operations.multiplications(left, right)


def _move_product(graph: Graph, node: Node, lane: int) -> tuple[list[Node], Node]:
    """Move a product to a lane, if only results of the backward pass need it."""
    if not all(after.target in _ALLOWED_AFTER for after in _after([node])):
        return [], node
    dtype = _common_cast([node])
    with graph.inserting_before(node):
        on_lane = graph.call_function(_ops.product_on_lane.default, (lane, dtype, *node.args))
    gradients = _replace_results(graph, [node], on_lane, dtype)
    return gradients, gradients[-1]


def _replace_results(graph: Graph, wanted: list[Node], on_lane: Node, dtype: torch.dtype | None) -> list[Node]:
    """Replace the old results (and casts of them to ``dtype``) by those of the call on the side lane."""
    values = [node.meta["val"] for node in wanted]
    on_lane.meta["val"] = [value if dtype is None else value.to(dtype) for value in values]
    parts = []
    for number, old in enumerate(wanted):
        with graph.inserting_after(on_lane):
            part = graph.call_function(operator.getitem, (on_lane, number))
        part.meta["val"] = on_lane.meta["val"][number]
        for cast in list(old.users) if dtype is not None else []:
            cast.replace_all_uses_with(part)
            graph.erase_node(cast)
        old.replace_all_uses_with(part)
        graph.erase_node(old)
        parts.append(part)
    return parts


def _common_cast(wanted: list[Node]) -> torch.dtype | None:
    """The dtype to which all users cast these results, so that the lane can cast; None if there is no such dtype."""
    users = [user for node in wanted for user in node.users]
    if not all(user.target is _prims.convert_element_type.default for user in users):
        return None
    dtypes = {user.args[1] for user in users}
    return dtypes.pop() if len(dtypes) == 1 else None  # type: ignore[return-value]


def _after(nodes: list[Node]) -> set[Node]:
    """All nodes that depend on these nodes, except the output."""
    following: set[Node] = set()
    left = list(nodes)
    while left:
        for user in left.pop().users:
            if user.op != "output" and user not in following:
                following.add(user)
                left.append(user)
    return following
