"""Side lanes for a compiled step: weight gradients of a compiled backward pass beside it.

A dispatch mode sees nothing of what a compiler fuses, and a compiler uses memory again as it sees fit. So the lanes are
put into the graph that is compiled, by a pass over it:

    main chain                                      after the pass

    dx, dw = convolution_backward(g, x, w)          dx = convolution_backward(g, x, w)       (its input alone)
    ... uses of dx ...                              dw = convolution_aside(lane 1, g, x, w)
    return dw.to(float32), ...                      ... uses of dx ...
                                                    join_lanes([dw, ...], [g, x, w, ...])
                                                    return dw, ...

``convolution_aside`` forks its lane off where it stands. ``join_lanes`` says that it writes to all results, so that the
compiler lets nobody read them before it; and that it reads all that the lanes read, so that the compiler does not use
that memory again before it. Nothing of this is taken on trust: at the join every storage that a lane was given must be
among those that the join got, and what was issued goes through the checker.

Only what leads to results of the backward pass by casts, views and sums goes aside: nobody else waits for it. Outside
of ``with CompiledLanes(...)`` the operations are computed where they stand.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from manyhands.engine.check import check
from manyhands.engine.journal import Journal
from manyhands.engine.schedule import Lane, Schedule
from manyhands.errors import UnsafeSchedule
from manyhands.task import Task
from manyhands.training.torch.side_lanes import Lanes

_aten = torch.ops.aten
_prims = torch.ops.prims
# What may stand between a gradient and the results of the backward pass.
_LIGHT = {
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

_Memories = dict[int, torch.UntypedStorage]

# The lanes of the step that is being made. The backward pass runs in a thread of autograd: it is no thread's own.
_current: CompiledLanes | None = None


class CompiledLanes:
    """``with CompiledLanes(lanes, 2): loss.backward()``, of a loss that was compiled with :class:`TakeAside`."""

    def __init__(self, lanes: Lanes, count: int, *, device: str = "cpu") -> None:
        self._lanes, self._count = lanes, count
        self._described = [Lane(device, number=number) for number in range(count + 1)]
        self.schedule: Schedule | None = None
        self._begin()

    def _begin(self) -> None:
        self.aside: list[str] = []
        self._journal = Journal(self._described)
        self._used: set[int] = set()
        self._given: _Memories = {}  # what lanes read, held until the join
        self._made: _Memories = {}

    def __enter__(self) -> CompiledLanes:
        global _current
        self._begin()
        _current = self
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        global _current
        _current = None
        self._join()
        self.schedule = self._journal.schedule()
        if kind is None:
            check(self.schedule)

    def call(self, lane: int, name: str, function: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Compute on a side lane, behind all that the main one has been given."""
        lane = (lane - 1) % self._count + 1
        given = _memories(inputs)
        self._journal.task(0, Task("main chain", writes=frozenset(given.keys() - self._given.keys())))
        self._journal.wait(lane, self._journal.mark(0))
        self._lanes.wait(lane, self._lanes.mark(0))
        with self._lanes.on(lane):
            results: list[torch.Tensor] = function()
        made = _memories(results)
        self._journal.task(lane, Task(name, frozenset(given), frozenset(made)))
        self.aside.append(name)
        self._used.add(lane)
        self._given.update(given)
        self._made.update(made)
        return results

    def join(self, results: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> None:
        """The main lane comes behind the others. ``kept``: what must have kept its memory until here."""
        lost = self._given.keys() - _memories(kept).keys()
        unread = self._made.keys() - _memories(results).keys()
        self._join()
        if unread:
            raise UnsafeSchedule(f"{len(unread)} results of side lanes are not joined: they might be read too early")
        if lost:
            raise UnsafeSchedule(
                f"the compiler gave {len(lost)} of {len(self._given)} inputs of side lanes as copies that it may use "
                "again while they are read"
            )

    def _join(self) -> None:
        for lane in sorted(self._used):
            self._journal.wait(0, self._journal.mark(lane))
            self._lanes.wait(0, self._lanes.mark(lane))
        # From here on everybody may read the results, and use the memory of what was given again.
        self._journal.task(0, Task("join", writes=frozenset(self._given.keys() | self._made.keys())))
        self._used.clear()
        self._given.clear()
        self._made.clear()


def _memories(tensors: Sequence[torch.Tensor]) -> _Memories:
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}


# The operations in the compiled graph

_library = torch.library.Library("manyhands", "FRAGMENT")
_library.define(
    "convolution_aside(int lane, ScalarType? dtype, Tensor gradient, Tensor input, Tensor weight, SymInt[]? bias, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, "
    "bool for_bias) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "product_aside(int lane, ScalarType? dtype, Tensor one, Tensor other) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "join_lanes(Tensor(a!)[] results, Tensor[] kept) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)


def _weight_gradient(dtype: torch.dtype | None, *given: Any) -> list[torch.Tensor]:
    *arguments, for_bias = given
    found = _aten.convolution_backward.default(*arguments, [False, True, for_bias])[1 : 3 if for_bias else 2]
    return [one if dtype is None else one.to(dtype) for one in found]


def _product(dtype: torch.dtype | None, one: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    found = torch.mm(one, other)
    return [found if dtype is None else found.to(dtype)]


def _convolution_aside(lane: int, dtype: torch.dtype | None, *given: Any) -> list[torch.Tensor]:
    if _current is None:
        return _weight_gradient(dtype, *given)
    name = "convolution, weight and bias" if given[-1] else "convolution, weight"
    return _current.call(lane, name, lambda: _weight_gradient(dtype, *given), given[:3])


def _product_aside(lane: int, dtype: torch.dtype | None, *given: torch.Tensor) -> list[torch.Tensor]:
    if _current is None:
        return _product(dtype, *given)
    return _current.call(lane, "product, weight", lambda: _product(dtype, *given), given)


def _join_lanes(results: list[torch.Tensor], kept: list[torch.Tensor]) -> None:
    if _current is not None:
        _current.join(results, kept)


_library.impl("convolution_aside", _convolution_aside, "CompositeExplicitAutograd")
_library.impl("product_aside", _product_aside, "CompositeExplicitAutograd")
_library.impl("join_lanes", _join_lanes, "CompositeExplicitAutograd")
torch.library.register_fake("manyhands::convolution_aside", lambda lane, *given: _weight_gradient(*given), lib=_library)
torch.library.register_fake("manyhands::product_aside", lambda lane, *given: _product(*given), lib=_library)
torch.library.register_fake("manyhands::join_lanes", lambda results, kept: None, lib=_library)
_ops = torch.ops.manyhands


# The pass


class TakeAside(CustomGraphPass):
    """Weight gradients to side lanes: ``torch.compile(f, options={"post_grad_custom_post_pass": TakeAside()})``."""

    def __call__(self, graph: Graph) -> None:
        if any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes):
            _take_aside(graph)

    def uuid(self) -> bytes:
        """What was compiled with another state of this file is not this."""
        return hashlib.sha256(inspect.getsource(inspect.getmodule(TakeAside)).encode()).digest()  # type: ignore[arg-type]


def _take_aside(graph: Graph) -> None:
    output = next(node for node in graph.nodes if node.op == "output")
    results: list[Node] = []
    kept: dict[Node, None] = {}
    for node in list(graph.nodes):
        if node.target is _aten.convolution_backward.default and node.args[-1][1]:
            made = _convolution(graph, node, len(results) + 1)
        elif node.target is _aten.mm.default:
            made = _product_of(graph, node, len(results) + 1)
        else:
            continue
        results += made
        for one in made:
            kept.update(dict.fromkeys(one.args[0].all_input_nodes))  # type: ignore[union-attr]
    if not results:
        return
    with graph.inserting_before(output):
        graph.call_function(_ops.join_lanes.default, (results, list(kept)))
    later = _after(results)
    for node in [node for node in graph.nodes if node in later]:
        output.prepend(node)
    graph.lint()


def _convolution(graph: Graph, node: Node, lane: int) -> list[Node]:
    """The gradients of weight and bias on a lane, the input's in its place; nothing where somebody waits for them."""
    arguments: Any = node.args
    *given, (for_input, _, for_bias) = arguments
    parts: dict[Any, Node] = {user.args[1]: user for user in node.users}
    wanted = [parts[number] for number in (1, 2) if number in parts]
    if 1 not in parts or not all(one.target in _LIGHT for one in _after(wanted)):
        return []
    dtype = _one_cast(wanted)
    with graph.inserting_before(node):
        if for_input and 0 in parts:
            first = graph.call_function(_aten.convolution_backward.default, (*given, [True, False, False]))
            first.meta["val"] = (node.meta["val"][0], None, None)
            parts[0].replace_input_with(node, first)
        aside = graph.call_function(_ops.convolution_aside.default, (lane, dtype, *given, for_bias and 2 in parts))
    made = _put_in(graph, wanted, aside, dtype)
    graph.erase_node(node)
    return made


def _product_of(graph: Graph, node: Node, lane: int) -> list[Node]:
    """A product on a lane, where nobody waits for it."""
    if not all(one.target in _LIGHT for one in _after([node])):
        return []
    dtype = _one_cast([node])
    with graph.inserting_before(node):
        aside = graph.call_function(_ops.product_aside.default, (lane, dtype, *node.args))
    return _put_in(graph, [node], aside, dtype)


def _put_in(graph: Graph, wanted: list[Node], aside: Node, dtype: torch.dtype | None) -> list[Node]:
    """Give the results of the call aside to those that took the old ones, and take those out."""
    values = [one.meta["val"] for one in wanted]
    aside.meta["val"] = [value if dtype is None else value.to(dtype) for value in values]
    made = []
    for number, old in enumerate(wanted):
        with graph.inserting_after(aside):
            part = graph.call_function(operator.getitem, (aside, number))
        part.meta["val"] = aside.meta["val"][number]
        for cast in list(old.users) if dtype is not None else []:
            cast.replace_all_uses_with(part)
            graph.erase_node(cast)
        old.replace_all_uses_with(part)
        graph.erase_node(old)
        made.append(part)
    return made


def _one_cast(wanted: list[Node]) -> torch.dtype | None:
    """The number type that all of them are cast to, and taken in no other: the lane can do that too."""
    users = [user for one in wanted for user in one.users]
    if not all(user.target is _prims.convert_element_type.default for user in users):
        return None
    dtypes = {user.args[1] for user in users}
    return dtypes.pop() if len(dtypes) == 1 else None  # type: ignore[return-value]


def _after(nodes: list[Node]) -> set[Node]:
    """All that is made of these, the output apart."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        for user in left.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                left.append(user)
    return found
