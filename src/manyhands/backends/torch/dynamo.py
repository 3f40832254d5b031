"""``torch.compile(model, backend="manyhands")``: Dynamo finds the graphs, the engine plans each over lanes.

PyTorch makes of a model a graph of its forward pass and one of its backward pass, pure ATen operations both. Each is a
function of tensors like any other, and is planned as such when it is first called, with the shapes that it then has:
traced, measured, proved, compared with the graph as it is, and kept as it is where lanes give nothing.

A graph's results may be its arguments, or views of them (what the backward pass needs of the forward pass), which a
planned function may not have. They are computed apart: there is nothing to plan about them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from manyhands.backends.torch import compat
from manyhands.errors import EngineError

NAME = "manyhands"
Function = Callable[..., Any]


def compile_with(module: GraphModule, inputs: Sequence[Any], make: Callable[[Function], Function]) -> Function:
    """What Dynamo shall call instead of a module; ``make`` plans a function of tensors."""

    def planned(graph: GraphModule, _: Any) -> Function:
        return compat.make_boxed_function(_Planned(graph, make))

    return compat.aot_autograd(fw_compiler=planned, bw_compiler=planned, inference_compiler=planned)(module, inputs)


def options_from(given: dict[str, Any]) -> dict[str, Any]:
    """``torch.compile(..., backend="manyhands", options={"fuse": False})``, checked."""
    options = dict(given.get("options") or {})
    if given.get("mode") not in (None, "default"):
        raise EngineError(f"mode={given['mode']!r} is Inductor's: the backend 'manyhands' measures what is fastest")
    if unknown := options.keys() - {"fuse"}:
        raise EngineError(
            f"the backend 'manyhands' has no option {', '.join(sorted(unknown))}: there is 'fuse' (compile runs of "
            "small operations, then put all on lanes), as in options={'fuse': False}"
        )
    if not isinstance(options.get("fuse", True), bool):
        raise EngineError(f"options={{'fuse': {options['fuse']!r}}}: give True or False")
    return options


def register(backend: Function, *, only_if_loaded: bool = False) -> None:
    """Let ``torch.compile`` know the name; an installed package is found by its entry point, without this."""
    if only_if_loaded and not compat.is_dynamo_loaded():
        return  # its import takes seconds
    compat.register_dynamo_backend(NAME, backend)


class _Planned:
    """A graph whose own results are planned, and whose other results are handed on."""

    def __init__(self, module: GraphModule, make: Callable[[Function], Function]) -> None:
        self._whole, self._make = module, make
        outputs: Any = next(node for node in module.graph.nodes if node.op == "output").args[0]
        given = {memory for node in module.graph.nodes if node.op == "placeholder" for memory in _memories(node)}
        own = [_is_own(one, given) for one in outputs]
        self._own = [number for number, is_own in enumerate(own) if is_own]
        self._others = [number for number, is_own in enumerate(own) if not is_own]
        self._rest = _part(module, [outputs[number] for number in self._others])
        self._function = _part(module, [outputs[number] for number in self._own])
        self._planned: dict[Any, Function] = {}  # by how the arguments share memory

    def __call__(self, *arguments: Any) -> Any:
        # PyTorch watches the first call of a graph by a dispatch mode, beside which nothing can be traced.
        if not self._own or compat.count_dispatch_modes():
            return self._whole(*arguments)
        results: list[Any] = [None] * (len(self._own) + len(self._others))
        for number, value in zip(self._own, self._plan(arguments), strict=True):
            results[number] = value
        for number, value in zip(self._others, self._rest(*arguments), strict=True):
            results[number] = value
        return results

    def _plan(self, arguments: Sequence[Any]) -> Any:
        arguments = [_plain(one) for one in arguments]
        views = _shared(arguments)
        if views not in self._planned:
            self._planned[views] = self._make(_of_bases(self._function, views) if views else self._function)
        if not views:
            return self._planned[views](*arguments)
        taken = {number for number, *_ in views}
        bases: dict[int, torch.Tensor] = {base: _whole_storage(arguments[base]) for _, base, *_ in views}
        given = [
            bases.get(number, one) for number, one in enumerate(arguments) if number in bases or number not in taken
        ]
        return self._planned[views](*given)


def _plain(value: Any) -> Any:
    """The same tensor without its gradients, which are not this graph's; a parameter stays one: it is read in place."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    if type(value) is torch.nn.Parameter:
        return torch.nn.Parameter(value.detach(), requires_grad=False)
    return value.detach()


# A view among the arguments: its number, the number of the first argument in its memory, and where it lies there.
_View = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


def _shared(arguments: Sequence[Any]) -> tuple[_View, ...]:
    """All arguments that share their memory with another one: what a pure graph may have, and a plan may not."""
    groups: dict[int, list[int]] = {}
    for number, one in enumerate(arguments):
        if isinstance(one, torch.Tensor) and one.layout is torch.strided:
            groups.setdefault(compat.memory_id(one), []).append(number)
    found: list[_View] = []
    for numbers in groups.values():
        if len(numbers) < 2 or len({arguments[number].dtype for number in numbers}) > 1:
            continue
        for number in numbers:
            one = arguments[number]
            found.append((number, numbers[0], tuple(one.shape), one.stride(), one.storage_offset()))
    return tuple(found)


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


def _of_bases(function: Function, views: tuple[_View, ...]) -> Function:
    """The same function of whole memories, each given once: the views are made inside."""
    made = {number: (base, shape, stride, offset) for number, base, shape, stride, offset in views}
    firsts = {base for _, base, *_ in views}

    def of_bases(*given: Any) -> Any:
        left = iter(given)
        bases: dict[int, Any] = {}
        arguments: list[Any] = []
        for number in range(len(given) + len(made) - len(firsts)):
            if number not in made:
                arguments.append(next(left))
                continue
            base, shape, stride, offset = made[number]
            if number == base:
                bases[base] = next(left)
            arguments.append(bases[base].as_strided(shape, stride, offset))
        return function(*arguments)

    return of_bases


def _is_own(value: Any, given: set[int]) -> bool:
    """Whether a result is a tensor in memory of its own."""
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return False
    return not _memories(value) & given


def _memories(node: Node) -> set[int]:
    value = node.meta.get("val")
    return {compat.memory_id(value)} if isinstance(value, torch.Tensor) else set()


def _part(module: GraphModule, outputs: Sequence[Any]) -> GraphModule:
    """A graph of the same arguments for some of the results."""
    graph, new = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        if node.op != "output":
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[one] if isinstance(one, Node) else one for one in outputs))
    return GraphModule(module, graph)
