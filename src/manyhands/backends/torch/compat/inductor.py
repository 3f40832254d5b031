"""Inductor: its passes, its processes, and compiling a graph without Dynamo.

Importing it takes seconds, so each function imports it when it is called.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from manyhands.backends.torch.compat import dynamo

_starting = threading.Lock()  # two threads at the same time would each start processes


def custom_graph_pass() -> Any:
    """The class of passes that Inductor runs over a graph, and whose identity is part of its cache's key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def prepare_inductor(arguments: Sequence[Any]) -> None:
    """If there are tensors on a GPU, import Inductor, and start the processes in which it compiles kernels.

    They need seconds until they are ready; kernels that are generated before are compiled one after the other, in this
    process. Called again, it wakes processes that have ended because nothing was compiled for a while. Errors are
    left to the compilation that follows.
    """
    if not any(isinstance(value, torch.Tensor) and value.is_cuda for value in arguments):
        return
    with _starting, suppress(Exception):
        from torch._inductor import compile_fx  # noqa: F401
        from torch._inductor.async_compile import AsyncCompile, maybe_warm_pool

        maybe_warm_pool()
        AsyncCompile.wakeup()


def inductor_compile(
    module: torch.fx.GraphModule, inputs: list[torch.Tensor], settings: dict[str, Any]
) -> Callable[..., Any]:
    """Compile a graph with Inductor, without Dynamo, under these settings of Inductor.

    ``inputs`` are fake tensors. By default Inductor lets ``aot_autograd`` make a pure graph first, which takes a tenth
    of the time; most of our graphs are pure, and are only traced in the operations that Inductor knows.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with dynamo.tracing, config.patch(settings):
        graph = _decomposed(module, inputs) if inputs and _is_pure(module.graph) else None
        if graph is not None and _is_pure(graph.graph):
            return _compile_pure(graph, inputs)
        return cast(Callable[..., Any], compile_fx(module, inputs))


def _decomposed(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph in the operations that Inductor knows; each node knows its result."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with cast(FakeTensor, inputs[0]).fake_mode:
        decomposed = make_fx(module, decomposition_table=select_decomp_table())(*inputs)
    decomposed.graph.eliminate_dead_code(_has_effect)
    decomposed.recompile()
    return decomposed


def _has_effect(node: torch.fx.Node) -> bool:
    """Whether a node must stay although nobody uses its result: it writes, or has no result, as a check."""
    schema = getattr(node.target, "_schema", None)
    return node.op in ("placeholder", "output") or (schema is not None and (schema.is_mutable or not schema.returns))


def _is_pure(graph: torch.fx.Graph) -> bool:
    """Whether a graph returns a tuple, has no constants, and writes nothing but copies to its arguments at the end."""
    copied: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default and not node.users:
            target = cast(torch.fx.Node, node.args[0])
            if target.op != "placeholder" or target in copied:
                return False
            copied.add(target)
        elif node.op == "call_function" and node.target is not operator.getitem:
            schema = getattr(node.target, "_schema", None)
            if copied or schema is None or schema.is_mutable:
                return False
        elif node.op == "get_attr" or (node.op == "output" and not isinstance(node.args[0], (tuple, list))):
            return False
    return True


def _compile_pure(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """Inductor's passes over a graph without gradients, and its code."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    prepare_inductor(inputs)
    mode = cast(FakeTensor, inputs[0]).fake_mode
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        # Newer releases prepare patterns for one kind of device.
        takes_device = "input_device" in inspect.signature(joint_graph_passes).parameters
        module = joint_graph_passes(module, **({"input_device": inputs[0].device} if takes_device else {}))
        output = next(node for node in module.graph.nodes if node.op == "output")
        results = cast(Sequence[Any], output.args[0])
        visible = [number for number, value in enumerate(results) if isinstance(value, torch.fx.Node)]
        output.meta["user_visible_output_idxs"] = visible  # they get the strides that the graph says
        compiled = compile_fx_inner(module, inputs, is_inference=True)

    def run(*arguments: torch.Tensor) -> Any:
        return compiled(list(arguments))

    return run
