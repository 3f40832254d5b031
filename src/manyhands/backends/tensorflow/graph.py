"""A TensorFlow graph as tasks: what each operation reads and writes, where it runs, and about how long it takes.

Each tensor is a memory, and so is each variable, by its handle: reading the variable reads that memory, assigning
writes it. A control input, by which an operation waits for another without using its results, is also a memory, which
the one writes and the other reads.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from manyhands.backends.runtime import estimate, task
from manyhands.backends.tensorflow import devices as adapter
from manyhands.schedule.task import Task

ASSIGNS = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply", "ResourceStridedSliceAssign")
_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3")
_NO_TASK = ("Placeholder", "Const", "NoOp", "Identity", "VarHandleOp")


class Graph:
    """The operations of a graph as tasks. What only waits or hands on (``NoOp``, ``Identity``) is none."""

    def __init__(self, concrete: Any, scope: str) -> None:
        self.tasks: list[Task] = []
        self.forms: list[str] = []
        self._memory: dict[str, set[int]] = {}
        self._count = 0
        usual = adapter.cpu() if adapter.virtual_count() or not adapter.num_gpus() else adapter.gpu(0)
        self._place = str(adapter.neutral(adapter._known(scope) if _named(scope) else usual))
        for operation in concrete.graph.get_operations():
            self._add(operation)

    def _new(self) -> set[int]:
        self._count += 1
        return {self._count}

    def _add(self, operation: Any) -> None:
        taken = [self._memory.get(tensor.name, set()) for tensor in operation.inputs]
        reads: set[int] = set().union(
            *taken, *(self._memory.get(f"^{control_input.name}", set()) for control_input in operation.control_inputs)
        )
        if operation.type in _NO_TASK:
            read_or_new = reads or (self._new() if operation.type == "Placeholder" else set())
            self._memory.update({tensor.name: read_or_new for tensor in operation.outputs})
            self._memory[f"^{operation.name}"] = reads
            return
        done = self._new()
        writes = set(done)
        for tensor in operation.outputs:
            self._memory[tensor.name] = result_memory = self._new()
            writes |= result_memory
        self._memory[f"^{operation.name}"] = done
        for tensor, memory in zip(operation.inputs, taken, strict=True):
            if tensor.dtype == tf.resource and operation.type.startswith(ASSIGNS):
                writes |= memory
        device = str(adapter.neutral(adapter._known(operation.device))) if _named(operation.device) else self._place
        heavy = operation.type in _PRODUCTS or operation.type.startswith("Conv")
        self.forms.append(f"{operation.type} {[tensor.shape for tensor in operation.inputs]}" if heavy else "")
        self.tasks.append(task(operation.type, reads, writes, device, _seconds(operation)))


def _named(device: str) -> bool:
    return adapter._NAME.search(device) is not None


def _seconds(operation: Any) -> float:
    inputs = [_size(tensor) for tensor in operation.inputs]
    written = sum(_size(tensor) for tensor in operation.outputs)
    work = float(written)
    if operation.type in _PRODUCTS:
        work = 2.0 * math.sqrt(max(inputs[0] * inputs[1] * written, 1))  # m, k, n: the root of mk, kn and mn multiplied
    elif operation.type.startswith("Conv2D"):
        work = 2.0 * written * inputs[1] / max(operation.inputs[1].shape[-1] or 1, 1)
    return estimate(work, sum(inputs) + written)


def _size(tensor: Any) -> int:
    if tensor.shape.rank is None or tensor.dtype == tf.resource:
        return 1
    return math.prod(length or 1 for length in tensor.shape.as_list())
