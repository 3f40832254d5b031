"""Lets Dynamo capture a function for its guards alone, without the work of running or describing the graph.

Importing Dynamo takes seconds, so each function imports it when it is called.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor

from manyhands.backends.torch.compat.dynamo import replaced, without_known_faults

# Settings for capturing a function for its guards: with the backward pass inside, and with recurrent layers.
_FOR_GUARDS = {
    "disable": False,
    "suppress_errors": False,
    "trace_autograd_ops": True,
    "allow_rnn": True,
    "skip_nnmodule_hook_guards": False,
    "side_effect_replay_policy": "silent",  # otherwise every gradient that is left behind is logged with its stack
    "use_graph_deduplication": False,
    "track_nodes_for_deduplication": False,
    "invalidate_compile_context_weakrefs": False,  # None asks all backends, and imports them for that
}

_UPDATES = ("step", "zero_grad")
_EMPTY_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Layers(Protocol):
    """Says which modules Dynamo need not follow, or not completely."""

    def are_hooks_watched(self, module: torch.nn.Module) -> bool:
        """Whether other guards notice when a module gets a hook."""

    def stand_in(self, module: torch.nn.Module, fake: torch.Tensor) -> Callable[..., Any] | None:
        """A function that computes a fake result of the module; None if Dynamo has to follow the module."""


@contextmanager
def dynamo_enabled(layers: Layers) -> Iterator[None]:
    """Let Dynamo capture, even if the user has switched it off: otherwise it would run the function.

    Its warnings are for users of torch.compile, and are silenced. It does not describe its guards in words either.
    """
    import torch._dynamo
    from torch._dynamo.convert_frame import compile_lock

    settings = {name: value for name, value in _FOR_GUARDS.items() if hasattr(torch._dynamo.config, name)}
    patch = torch._dynamo.config.patch(settings)
    with torch.compiler.set_stance("default"), patch, warnings.catch_warnings(), compile_lock:
        warnings.simplefilter("ignore")
        others = _opaque_optimizers(), without_known_faults(), _known_layers(layers)
        with others[0], others[1], others[2], _without_descriptions(), _without_imports():
            yield


def _opaque_optimizers() -> AbstractContextManager[None]:
    """Let Dynamo take an optimizer's update for a call that does nothing.

    If it followed an update it would break the graph, and set ``capturable`` of the user's optimizer.
    """
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.misc import LambdaVariable
    from torch._dynamo.variables.optimizer import OptimizerVariable

    kind: Any = OptimizerVariable
    getting, calling = kind.var_getattr, kind.call_method

    def var_getattr(optimizer: Any, translator: Any, name: str) -> Any:
        if name in _UPDATES:
            return LambdaVariable(lambda *_, **__: ConstantVariable.create(None))
        return getting(optimizer, translator, name)

    def call_method(optimizer: Any, translator: Any, name: str, *arguments: Any) -> Any:
        if name in _UPDATES:
            return ConstantVariable.create(None)
        return calling(optimizer, translator, name, *arguments)

    return replaced((kind, "var_getattr", var_getattr), (kind, "call_method", call_method))


def _known_layers(layers: Layers) -> AbstractContextManager[None]:
    """Let Dynamo use stand-ins for layers that have one, and not guard hooks that are watched."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import ConstDictVariable, TensorVariable
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    kind: Any = UnspecializedNNModuleVariable
    calling, getting = kind.call_function, kind.var_getattr

    def call_function(layer: Any, translator: Any, arguments: Any, keywords: Any) -> Any:
        if len(arguments) == 1 and not keywords and layer.source is not None and _is_as_it_was(layer, translator):
            tensor = arguments[0].realize() if hasattr(arguments[0], "realize") else arguments[0]
            fake = tensor.as_proxy().node.meta.get("example_value") if type(tensor) is TensorVariable else None
            stand_in = layers.stand_in(layer.value, fake) if type(fake) is FakeTensor else None
            if stand_in is not None:
                install_guard(layer.source.make_guard(GuardBuilder.ID_MATCH))
                proxy = translator.output.create_proxy("call_function", stand_in, (tensor.as_proxy(),), {})
                return wrap_fx_proxy(translator, proxy)
        return calling(layer, translator, arguments, keywords)

    def var_getattr(layer: Any, translator: Any, name: str) -> Any:
        watched = name in _EMPTY_HOOKS and layers.are_hooks_watched(layer.value) and not getattr(layer.value, name)
        if watched and not translator.output.side_effects.has_pending_mutation_of_attr(layer, name):
            return ConstDictVariable({})
        return getting(layer, translator, name)

    return replaced((kind, "call_function", call_function), (kind, "var_getattr", var_getattr))


def _is_as_it_was(layer: Any, translator: Any) -> bool:
    """Whether the captured code has neither changed a module nor read its parts so far."""
    effects, module = translator.output.side_effects, layer.value
    looked_into = any(vars(module)[name] in effects for name in ("_parameters", "_buffers", "_modules"))
    return not looked_into and not effects.has_pending_mutation(layer)


def _without_descriptions() -> AbstractContextManager[None]:
    """Keep Dynamo from describing and timing its guards, and from naming functions, for logs that nobody reads here.

    To time guards it empties the processor's caches first, which takes longer than capturing a small function.
    """
    from torch._dynamo import guards, symbolic_convert

    def no_description(parts: Any, *_: Any, **__: Any) -> list[str]:
        return parts if isinstance(parts, list) else [parts]

    return replaced(
        (guards, "get_verbose_code_parts", no_description),
        (guards, "profile_guard_manager", lambda *_: 0.0),
        (symbolic_convert, "get_funcname", lambda *_: None),
    )


def _without_imports() -> AbstractContextManager[None]:
    """Keep Dynamo from importing what it does not need here: aot_autograd, Inductor, DTensor, NetworkX.

    They take two seconds, as long as capturing a net of 500 operations.
    """
    from torch._dynamo import eval_frame, output_graph, symbolic_convert
    from torch._dynamo.variables import higher_order_ops
    from torch.fx.experimental import symbolic_shapes

    wrapping, thread = eval_frame.get_compiler_fn, threading.get_ident()
    local_maps: Any = getattr(higher_order_ops, "LocalMapWrappedHigherOrderVariable", None)
    is_local_map: Any = getattr(local_maps, "should_wrap_in_hop", None)

    def get_compiler_fn(backend: Any) -> Any:
        """Without a wrapper for debugging; who calls torch.compile in another thread gets it."""
        return backend if threading.get_ident() == thread else wrapping(backend)

    def should_wrap_in_hop(value: Any) -> bool:
        return _LOCAL_MAP in sys.modules and is_local_map(value)

    return replaced(
        (eval_frame, "get_compiler_fn", get_compiler_fn),
        (local_maps, "should_wrap_in_hop", staticmethod(should_wrap_in_hop)),
        (output_graph, "GraphRegionTracker", object),  # finds equal parts of a graph, which are not needed
        # It looks up a backend by name; functions are not planned inside a transform of torch.func anyway.
        (symbolic_convert.InstructionTranslator, "_throw_if_in_functorch", lambda translator: None),
        # Stacks and side effects in words
        (output_graph, "uninteresting_files", _AllFiles),
        (symbolic_shapes, "uninteresting_files", _AllFiles),
        (output_graph.OutputGraph, "get_replayed_side_effect_source_refs", lambda *_, **__: []),
    )


_LOCAL_MAP = "torch.distributed.tensor.experimental._func_map"


class _AllFiles:
    """Contains every file: no line of a stack is shown."""

    def __contains__(self, name: str) -> bool:
        return True


def compile_whole(function: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Let Dynamo capture a function as one graph, for fixed shapes; raises if it cannot."""
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def dynamo_check(function: Any) -> Callable[[dict[str, Any]], bool] | None:
    """The check that Dynamo makes of a function's variables before it uses what it has captured."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    entries = _debug_get_cache_entry_list(function.__code__)
    return entries[0].guard_manager.check if len(entries) == 1 else None
