"""Everything of PyTorch that is replaced while virtual devices stand in for GPUs: one list, each with its reason.

``start`` replaces, ``stop`` puts back the very objects that stood there. Beside these, :mod:`..virtual` replaces what
its tensors need by any name (``swap_tensors``, lazy parameters, ``Thread.start``).

Not replaced: ``torch.version.cuda``, ``torch.cuda.is_initialized`` and ``torch.backends.cuda``, which tell the truth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.cuda.comm

from manyhands.backends.torch import compat, virtual
from manyhands.backends.torch.cuda_stand_in import answers, calls, comm, streams
from manyhands.backends.torch.replacements import Replacements

_changes = Replacements()


def start() -> None:
    for owner, name, value in list(_list(torch.cuda.is_available())):
        if hasattr(owner, name):  # an older PyTorch may lack a name
            _changes.replace(owner, name, value)
    # By a function mode, not by replacing methods: only threads with our hooks see them.
    virtual.instead.update(
        {
            torch.Tensor.cuda: calls.cuda,
            torch.Tensor.pin_memory: calls.pin_memory,
            torch.Tensor.is_pinned: calls.is_pinned,
            torch.Tensor.type: calls.type_name,
        }
    )


def stop() -> None:
    _changes.undo()
    virtual.instead.clear()
    virtual.of_thread.current = 0
    virtual.of_thread.streams.clear()


def _list(has_gpu: bool) -> Iterator[tuple[Any, str, Any]]:
    yield from ((torch.cuda, name, value) for name, value in _devices().items())
    yield from ((torch.cuda, name, value) for name, value in _waiting().items())
    for name, value in _memory().items():  # torch.cuda.memory_allocated is torch.cuda.memory's
        yield torch.cuda, name, value
        yield torch.cuda.memory, name, value
    for name, value in _random().items():
        yield torch.cuda, name, value
        yield torch.cuda.random, name, value
    yield from ((torch.accelerator, name, value) for name, value in _accelerator().items())
    # DataParallel and torch.nn.parallel.scatter/gather/replicate send by these, which are C++ for CUDA.
    for name in ("broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced", "scatter", "gather"):
        yield torch.nn.parallel.comm, name, getattr(comm, name)
        yield torch.cuda.comm, name, getattr(comm, name)
    yield compat.parallel_functions.Scatter, "forward", staticmethod(comm.scatter_forward)
    # autocast("cuda") would leave virtual devices alone.
    yield torch.autocast, "__enter__", calls.on_cpu_too(torch.autocast.__enter__)
    yield torch.autocast, "__exit__", calls.off_cpu_too(torch.autocast.__exit__)
    # C++ that looks for the GPU itself.
    yield torch, "load", calls.loading(torch.load)
    yield torch, "Generator", calls.Generator
    yield torch.cuda, "CUDAGraph", streams.NoGraphs
    yield torch.cuda, "graph", streams.NoGraphs
    ddp = torch.nn.parallel.DistributedDataParallel
    yield ddp, "__init__", calls.refusing_ddp(ddp.__init__)
    # Marks for NVIDIA's profiler, which raise where PyTorch was built without CUDA.
    yield from ((torch.cuda.nvtx, name, answers.nothing) for name in ("range_push", "range_pop", "mark"))
    # Recurrent layers ask it of every GPU tensor, and warn where PyTorch was built without.
    yield torch.backends.cudnn, "is_acceptable", lambda tensor: False
    # What all of PyTorch calls before it uses CUDA.
    initialize = getattr(torch.cuda, compat.LAZY_INIT)
    yield torch.cuda, compat.LAZY_INIT, calls.initializing(initialize, has_gpu)


def _devices() -> dict[str, Any]:
    """Which devices there are, which is the current one, and what they are."""
    return {
        "is_available": answers.is_available,
        "device_count": virtual.count,
        "current_device": answers.current_device,
        "set_device": streams.set_device,
        "device": streams.CurrentDevice,
        "device_of": streams.DeviceOf,
        "get_device_name": answers.get_device_name,
        "get_device_properties": answers.get_device_properties,
        "get_device_capability": answers.get_device_capability,
        "can_device_access_peer": lambda device, peer_device: True,
        "is_bf16_supported": lambda *unused, **more: True,  # autocast and programs ask; the CPU does it
        "init": answers.nothing,
    }


def _waiting() -> dict[str, Any]:
    """Streams, events and waits: work is done when it is issued, so none of them has anything to wait for."""
    return {
        "synchronize": streams.synchronize,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "is_current_stream_capturing": lambda: False,
        "set_sync_debug_mode": answers.set_sync_debug_mode,
        "get_sync_debug_mode": answers.get_sync_debug_mode,
    }


def _memory() -> dict[str, Any]:
    """What programs print about memory. There is no cache, so reserved is allocated."""
    return {
        "memory_allocated": answers.memory_allocated,
        "memory_reserved": answers.memory_allocated,
        "max_memory_allocated": answers.max_memory_allocated,
        "max_memory_reserved": answers.max_memory_allocated,
        "reset_peak_memory_stats": answers.reset_peak_memory_stats,
        "reset_max_memory_allocated": answers.reset_peak_memory_stats,
        "memory_summary": answers.memory_summary,
        "mem_get_info": answers.mem_get_info,
        "empty_cache": answers.nothing,
        "ipc_collect": answers.nothing,
    }


def _random() -> dict[str, Any]:
    """Seeds and states: ``torch.manual_seed`` and ``fork_rng`` call these too."""
    return {
        "manual_seed": answers.manual_seed,
        "manual_seed_all": answers.manual_seed,
        "seed": answers.seed,
        "seed_all": answers.seed,
        "initial_seed": answers.initial_seed,
        "get_rng_state": answers.get_rng_state,
        "get_rng_state_all": answers.get_rng_state_all,
        "set_rng_state": answers.set_rng_state,
        "set_rng_state_all": answers.set_rng_state_all,
    }


def _accelerator() -> dict[str, Any]:
    """The newer names for the same: DataLoader (page-locked memory), DataParallel and recent tutorials ask these."""
    return {
        "is_available": answers.is_available,
        "device_count": virtual.count,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": answers.current_device,
        "current_device_idx": answers.current_device,
        "set_device_index": streams.set_device,
        "set_device_idx": streams.set_device,
        "device_index": streams.CurrentDevice,
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
        "synchronize": streams.synchronize,
        "empty_cache": answers.nothing,
        "memory_allocated": answers.memory_allocated,
        "memory_reserved": answers.memory_allocated,
        "max_memory_allocated": answers.max_memory_allocated,
        "max_memory_reserved": answers.max_memory_allocated,
        "reset_peak_memory_stats": answers.reset_peak_memory_stats,
        "get_memory_info": answers.mem_get_info,
    }
