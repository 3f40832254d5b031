"""Everything of PyTorch that is replaced while virtual devices stand in for GPUs: one list, each with its reason.

``start`` replaces, ``stop`` puts the original objects back. Besides, :mod:`..virtual` replaces what its tensors need
whatever their devices are called (``swap_tensors``, lazy parameters, ``Thread.start``).

Not replaced: ``torch.version.cuda``, ``torch.cuda.is_initialized`` and ``torch.backends.cuda``, which tell the truth.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.cuda.comm

from manyhands.backends.torch import compat, virtual
from manyhands.backends.torch.cuda_stand_in import answers, calls, streams

_changes = ExitStack()


def start() -> None:
    for owner, name, value in list(_list(torch.cuda.is_available())):
        if hasattr(owner, name):  # an older PyTorch may lack a name
            _changes.enter_context(mock.patch.object(owner, name, value))
    # By a function mode, not by replacing methods: only threads with our hooks see them.
    virtual.instead.update(
        {
            torch.device: calls.device,
            compat.parse_to: calls.parse_to,
            torch.Tensor.cuda: calls.cuda,
            torch.Tensor.pin_memory: calls.pin_memory,
            torch.Tensor.is_pinned: calls.is_pinned,
            torch.Tensor.type: calls.type_name,
        }
    )


def stop() -> None:
    _changes.close()
    virtual.instead.clear()
    virtual.of_thread.current = 0
    virtual.of_thread.streams.clear()


def _list(has_gpu: bool) -> Iterator[tuple[Any, str, Any]]:
    yield from _each(_devices(), torch.cuda)
    yield from _each(_waits(), torch.cuda)
    yield from _each(_memory(), torch.cuda, torch.cuda.memory)  # torch.cuda.memory_allocated is torch.cuda.memory's
    yield from _each(_random(), torch.cuda, torch.cuda.random)
    yield from _each(_accelerator(), torch.accelerator)
    # DataParallel and torch.nn.parallel.scatter/gather/replicate send by these, which are C++ for CUDA.
    sending = ("broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced", "scatter", "gather")
    yield from _each(_by_name(calls, *sending), torch.nn.parallel.comm, torch.cuda.comm)
    yield compat.parallel_functions.Scatter, "forward", staticmethod(calls.scatter_forward)
    # autocast("cuda") would leave virtual devices alone.
    yield torch.autocast, "__enter__", calls.on_cpu_too(torch.autocast.__enter__)
    yield torch.autocast, "__exit__", calls.off_cpu_too(torch.autocast.__exit__)
    # C++ that looks for the GPU itself.
    yield torch, "load", calls.wrap_load(torch.load)
    yield torch, "Generator", calls.Generator
    yield from _each({"CUDAGraph": streams.NoGraphs, "graph": streams.NoGraphs}, torch.cuda)
    ddp = torch.nn.parallel.DistributedDataParallel
    yield ddp, "__init__", calls.refusing_ddp(ddp.__init__)
    # Marks for NVIDIA's profiler, which raise where PyTorch was built without CUDA.
    yield from _each(dict.fromkeys(("range_push", "range_pop", "mark"), answers.nothing), torch.cuda.nvtx)
    # The profiler asks CUDA for the times of every operation; a warning of C++ for each would be the answer.
    profile = torch.autograd.profiler.profile
    yield profile, "__init__", calls.profiling_the_host(profile.__init__)
    yield torch.cuda.nccl, "version", answers.nccl_version
    # Recurrent layers call it for every GPU tensor, and warn if PyTorch was built without cuDNN.
    yield torch.backends.cudnn, "is_acceptable", lambda tensor: False
    # All of PyTorch calls it before using CUDA.
    initialize = getattr(torch.cuda, compat.LAZY_INIT)
    yield torch.cuda, compat.LAZY_INIT, calls.wrap_initialize(initialize, has_gpu)


def _each(stand_ins: dict[str, Any], *owners: Any) -> Iterator[tuple[Any, str, Any]]:
    for owner in owners:
        yield from ((owner, name, value) for name, value in stand_ins.items())


def _by_name(module: Any, *names: str) -> dict[str, Any]:
    """What stands in for PyTorch's functions and classes under the same names."""
    return {name: getattr(module, name) for name in names}


def _devices() -> dict[str, Any]:
    """Which devices there are, which is the current one, and what they are."""
    return {
        **_by_name(answers, "is_available", "current_device", "get_device_name", "get_device_properties"),
        **_by_name(answers, "get_device_capability"),
        "device_count": virtual.count,
        "set_device": streams.set_device,
        "device": streams.CurrentDevice,
        "device_of": streams.DeviceOf,
        "can_device_access_peer": lambda device, peer_device: True,
        "is_bf16_supported": lambda *unused, **more: True,  # autocast and programs ask; the CPU does it
        "init": answers.nothing,
    }


def _waits() -> dict[str, Any]:
    """Streams, events and waits: work is done when it is issued, so none of them has anything to wait for."""
    return {
        **_by_name(
            streams, "Stream", "Event", "stream", "current_stream", "default_stream", "set_stream", "synchronize"
        ),
        **_by_name(answers, "set_sync_debug_mode", "get_sync_debug_mode"),
        "is_current_stream_capturing": lambda: False,
    }


def _memory() -> dict[str, Any]:
    """What programs print about memory. There is no cache, so reserved is allocated."""
    return {
        **_memory_of_accelerator(),
        "reset_max_memory_allocated": answers.reset_peak_memory_stats,
        "ipc_collect": answers.nothing,
        **_by_name(answers, "memory_summary", "mem_get_info"),
    }


def _memory_of_accelerator() -> dict[str, Any]:
    return {
        **_by_name(answers, "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"),
        "memory_reserved": answers.memory_allocated,
        "max_memory_reserved": answers.max_memory_allocated,
        "empty_cache": answers.nothing,
    }


def _random() -> dict[str, Any]:
    """Seeds and states: ``torch.manual_seed`` and ``fork_rng`` call these too."""
    return {
        **_by_name(answers, "manual_seed", "seed", "initial_seed"),
        **_by_name(answers, "get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all"),
        "manual_seed_all": answers.manual_seed,
        "seed_all": answers.seed,
    }


def _accelerator() -> dict[str, Any]:
    """The newer names for the same: DataLoader (page-locked memory), DataParallel and recent tutorials ask these."""
    return {
        **_memory_of_accelerator(),
        **_by_name(streams, "current_stream", "set_stream", "synchronize"),
        "is_available": answers.is_available,
        "device_count": virtual.count,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": answers.current_device,
        "current_device_idx": answers.current_device,
        "set_device_index": streams.set_device,
        "set_device_idx": streams.set_device,
        "device_index": streams.CurrentDevice,
        "get_memory_info": answers.mem_get_info,
    }
