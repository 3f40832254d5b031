"""Facts about a trace, without running it: its memories and their bytes, and which operations could be batched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from manyhands import machine
from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.compat import tree_leaves

# What to write instead of several calls of one operation.
_BATCHED = {
    "mm": "one torch.bmm of stacked matrices",
    "addmm": "one torch.baddbmm of stacked matrices",
    "bmm": "one torch.bmm of joined batches",
    "convolution": "one convolution with groups, or torch.vmap",
    "_scaled_dot_product": "one attention over joined batches",
    "native_layer_norm": "torch.vmap over stacked tensors",
    "native_batch_norm": "torch.vmap over stacked tensors",
}


def footprint(trace: Trace) -> tuple[dict[int, int], frozenset[int], frozenset[int]]:
    """The bytes of each memory, the memories of the inputs, and those of the results."""
    sizes: dict[int, int] = {}
    for node in trace.module.graph.nodes:
        # As in trace.py: a tensor from outside, and a view of it, has a negative number.
        outside = [memory for memory in trace.storages.get(node, ()) if memory < 0]
        known = trace.constant(node) if node.op == "get_attr" else node.meta.get("val")
        for value in tree_leaves(known):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                sizes[outside[0] if outside else compat.storage_id(storage)] = storage.nbytes()
    return sizes, trace.callers_memories() & sizes.keys(), trace.memories_of(trace.outputs) & sizes.keys()


def written_memories(trace: Trace) -> frozenset[int]:
    """The memories of arguments and of tensors from outside that the function writes to."""
    return trace.callers_memories() & trace.written_memories()


def written_values(trace: Trace, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments and the tensors from outside that the function writes to."""
    written = written_memories(trace)
    places = [*zip(trace.inputs, tensors, strict=True)]
    places += [(node, trace.constant(node)) for node in trace.constants]
    changed = {id(t): t for node, t in places if isinstance(t, torch.Tensor) and trace.storages[node] & written}
    return list(changed.values())


def copied_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of arguments that a CUDA graph copies: all but parameters, which are read in place."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if type(tensor) is not torch.nn.Parameter)


def device_memory(devices: tuple[torch.device, ...] | None) -> int:
    """The total bytes of the smallest of these GPUs, or of the host."""
    if devices is None:
        return machine.host_memory().total
    return min(int(torch.cuda.get_device_properties(device).total_memory) for device in devices)


def batch_hint(trace: Trace, number: int) -> str | None:
    """What several such operations could be written as, if they can be batched; else None."""
    step = trace.steps[number]
    name = step.task.name
    values = [value for value in tree_leaves(step.node.meta.get("val")) if isinstance(value, torch.Tensor)]
    if step.task.kind != "compute" or not values or not step.task.writes - step.task.reads:
        return None
    better = next((text for word, text in _BATCHED.items() if name.startswith(word)), None)
    if better is None:
        return None
    return f"{name} {_shapes(step.node)} could be {better}: measure it"


def _shapes(node: Node) -> str:
    values: list[Any] = [source.meta.get("val") for source in node.all_input_nodes]
    return " and ".join(
        "x".join(map(str, value.shape)) for value in values if isinstance(value, torch.Tensor) and value.dim()
    )


def results_share(trace: Trace) -> bool:
    """Whether results share memory with each other, according to the trace."""
    nodes = {value for value in trace.outputs if isinstance(value, Node)}
    memories = [memory for node in nodes for memory in trace.storages[node]]
    return len(set(memories)) < len(memories)
