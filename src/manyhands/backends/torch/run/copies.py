"""Copies of results for the caller, and copies inside a CUDA graph, whose addresses change with every replay.

A captured graph always reads and writes the same addresses, but the caller's arguments may be anywhere, and results
go to new memory, which belongs to the caller. Copies before and after a replay would be two more launches. So the
copies are nodes of the graph: our own kernels (``copy_parts.cu``), which take addresses as arguments. These are set in
the instantiated graph before it is launched:

    results = fresh()
    copies.retarget(results)
    graph.replay()

A replay in progress keeps the addresses that it was launched with. No other thread may set addresses or replay the same
graph at the same time.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from manyhands.backends.torch import compat
from manyhands.backends.torch.kernels.nvrtc import Kernels, compile_file
from manyhands.backends.torch.run.graph_nodes import KERNEL, KernelNode, nodes_of
from manyhands.errors import CannotCompile

_ROOMS = (8, 32, 120, 480)  # tensors per kernel, 32 bytes of arguments each; old drivers accept 4096 bytes
_THREADS = 256
_CHUNK = _THREADS * 16 * 8  # bytes that a block copies
_NEVER = (1 << 63) - 1  # the first block of unused parts
_of_thread = threading.local()


# Copies of results


def copy_all(values: Sequence[Any]) -> list[Any]:
    """Copies of the values. A tensor that occurs twice stays one tensor; tensors that share memory share it again."""
    tensors = {id(value): value.detach() for value in values if isinstance(value, torch.Tensor)}
    copies: dict[int, torch.Tensor] = {}
    by_form: dict[Any, list[int]] = {}
    for keys in _sharing_memory(tensors):
        storage = tensors[keys[0]].untyped_storage().clone()
        for key in keys:
            tensor = tensors[key]
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copies[key] = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    for key, value in tensors.items():
        if key in copies:
            continue
        if value.device.type == "cuda":
            by_form.setdefault((value.device, value.dtype), []).append(key)
        else:
            copies[key] = value.clone()
    for keys in by_form.values():
        fresh = [torch.empty_like(tensors[key]) for key in keys]
        compat.foreach_copy_(fresh, [tensors[key] for key in keys])  # one kernel for all
        copies.update(zip(keys, fresh, strict=True))
    return [copies[id(value)] if isinstance(value, torch.Tensor) else value for value in values]


def has_no_gaps(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill contiguous memory, each once, in any order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def allocator(values: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """A function that allocates new tensors with the shapes, strides and dtypes of these, which are on one GPU."""
    like = [torch.empty_like(value, device="meta") for value in values]
    forms = [(tuple(form.shape), form.stride(), form.dtype) for form in like]
    empty = _empty(values[0].device)
    return lambda: [empty(size, stride, dtype) for size, stride, dtype in forms]


def _empty(device: torch.device) -> Callable[..., torch.Tensor]:
    """An allocation function; on the current device, the fast one that PyTorch has for its compiled code."""
    quick = compat.empty_strided_cuda
    if quick is not None and torch.cuda.device_count() == 1:
        return quick  # type: ignore[no-any-return]
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _sharing_memory(tensors: Mapping[int, torch.Tensor]) -> list[list[int]]:
    """Groups of tensors that share memory; only plain strided tensors without a conjugate or negative bit."""
    groups: dict[int, list[int]] = {}
    for key, tensor in tensors.items():
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel():
            groups.setdefault(compat.memory_id(tensor), []).append(key)
    shared = [keys for keys in groups.values() if len(keys) > 1]
    return [keys for keys in shared if not any(tensors[key].is_conj() or tensors[key].is_neg() for key in keys)]


# Copies inside a CUDA graph


def can_be_copied(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    """Whether these can be copied as bytes: all on this GPU, each in contiguous memory without gaps."""
    return 0 < len(tensors) <= _ROOMS[-1] and all(
        tensor.device == device
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
        and has_no_gaps(tensor)
        for tensor in tensors
    )


def prepare(count: int, device: torch.device) -> tuple[Kernels, int]:
    """The kernels for ``count`` tensors, and how many tensors they have room for; call this before a capture.

    The first call compiles them.
    """
    room = next(room for room in _ROOMS if room >= count)
    kernels = compile_file("copy_parts.cu", device, PARTS=str(room), CHUNK=str(_CHUNK))
    with torch.cuda.device(device):
        for name in ("copy_in", "copy_out"):
            kernels.function(name)
    return kernels, room


def pieces(sizes: Sequence[int]) -> tuple[list[int], int]:
    """For parts of these sizes in bytes, the first block of each, and the total number of blocks."""
    firsts, blocks = [], 0
    for size in sizes:
        firsts.append(blocks)
        blocks += math.ceil(size / _CHUNK)
    return firsts, max(1, blocks)


class Copies:
    """Copies from tensors elsewhere to these (``copy_in``), or from these to tensors elsewhere (``copy_out``).

    :func:`can_be_copied` is true of these tensors; those elsewhere have the same form.
    """

    def __init__(self, name: str, near: Sequence[torch.Tensor], device: torch.device) -> None:
        self._name, self._device = name, device
        self._near = list(near)  # the graph holds addresses: keep that memory alive
        self._kernels, room = prepare(len(near), device)
        sizes = [tensor.numel() * tensor.element_size() for tensor in near]
        firsts, self._blocks = pieces(sizes)
        here, there = (room, 0) if name == "copy_in" else (0, room)
        # In the kernel's order: all sources, all targets, all sizes, all first blocks.
        numbers = (ctypes.c_uint64 * (4 * room))()
        for start, values in ((here, [tensor.data_ptr() for tensor in near]), (2 * room, sizes)):
            numbers[start : start + len(near)] = values  # type: ignore[assignment]
        numbers[3 * room :] = firsts + [_NEVER] * (room - len(near))  # type: ignore[assignment]
        self._numbers, self._first, self._last = numbers, there, there + len(near)
        self._places = (ctypes.c_void_p * 1)(ctypes.addressof(numbers))
        self._settings = KernelNode()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._set: Callable[[], int] | None = None
        self._aimed: list[int] | None = None  # addresses that the next replay copies from, or to

    def launch(self) -> None:
        """Launch the copies on the current stream, which is being captured; they copy nothing before ``retarget``."""
        self._kernels.launch_at(self._name, (self._blocks, 1), (_THREADS, 1), self._places)

    def find(self, graph: torch.cuda.CUDAGraph) -> None:
        """Look up the copies in the captured graph, which must have been created with ``keep_graph=True``."""
        driver = self._kernels.driver
        node = _node(driver, graph.raw_cuda_graph(), self._kernels.function(self._name), self._settings)
        self._settings.arguments = ctypes.addressof(self._places)
        self._settings.extra = None
        pointers = graph.raw_cuda_graph_exec(), node, ctypes.addressof(self._settings)
        self._set = functools.partial(driver.cuGraphExecKernelNodeSetParams_v2, *map(ctypes.c_void_p, pointers))
        self._graph = graph  # keeps the node alive
        if status := self._set():
            raise CannotCompile(f"CUDA does not let the copies of a graph be aimed: error {status}")

    def retarget(self, far: Sequence[torch.Tensor]) -> None:
        """Make the next replay copy from, or to, these tensors."""
        if not hasattr(_of_thread, "context"):
            _enter(self._device)
        places = [tensor.data_ptr() for tensor in far]
        if places == self._aimed:  # CUDA has these addresses: freed memory was allocated again
            return
        self._numbers[self._first : self._last] = places  # type: ignore[assignment]
        self._aimed = None
        if status := self._set():  # type: ignore[misc]
            raise RuntimeError(f"CUDA refuses to retarget the copies of a graph: error {status}")
        self._aimed = places


def _enter(device: torch.device) -> None:
    """Ensure that this thread has a CUDA context: without one, direct calls of CUDA's driver crash."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()
    _of_thread.context = True


def _node(driver: ctypes.CDLL, graph: int, function: ctypes.c_void_p, settings: KernelNode) -> int:
    """The graph's node that runs this kernel; fills ``settings`` with the node's captured parameters."""
    for node in nodes_of(driver, graph, KERNEL):
        status = driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(settings))
        if status == 0 and settings.function == function.value:
            return node
    raise CannotCompile("the copies are not in the graph that was captured with them")
