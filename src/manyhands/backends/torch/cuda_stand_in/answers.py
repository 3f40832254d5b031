"""What ``torch.cuda`` answers of virtual devices: their number, names, memory and random numbers."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import torch

from manyhands import machine
from manyhands.backends.torch import compat, virtual
from manyhands.backends.torch.cuda_stand_in.streams import index_of

_peaks: dict[int, int] = {}
_SYNC_DEBUG_MODES = ("default", "warn", "error")
_sync_debug_mode = 0


def is_available() -> bool:
    return True


def current_device() -> int:
    return virtual.of_thread.current


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Only remembered: nothing waits on virtual devices. ``manyhands audit`` finds what would wait."""
    global _sync_debug_mode
    if isinstance(debug_mode, str):
        if debug_mode not in _SYNC_DEBUG_MODES:  # PyTorch's own words
            raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
        debug_mode = _SYNC_DEBUG_MODES.index(debug_mode)
    _sync_debug_mode = debug_mode


def get_sync_debug_mode() -> int:
    return _sync_debug_mode


def get_device_name(device: Any = None) -> str:
    """The truth, for whoever asks: the number of the virtual device, and the CPU behind it."""
    return f"virtual device {index_of(device)} (CPU: {machine.host_name()})"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """0.0: too low for any program to use custom CUDA kernels."""
    index_of(device)
    return 0, 0


def nccl_version() -> tuple[int, int, int]:
    """0.0.0: older than any NCCL. Virtual devices exchange tensors without it."""
    return 0, 0, 0


def get_device_properties(device: Any = None) -> Any:
    """The names that programs read, with the host's figures."""
    memory = machine.host_memory()
    return SimpleNamespace(
        name=get_device_name(device),
        major=0,
        minor=0,
        total_memory=memory.total if memory else 0,
        multi_processor_count=os.cpu_count() or 1,
        is_integrated=1,
        is_multi_gpu_board=0,
        warp_size=1,
    )


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes, of the host: all virtual devices share its memory."""
    index_of(device)
    memory = machine.host_memory()
    return (memory.free, memory.total) if memory else (0, 0)


def memory_allocated(device: Any = None) -> int:
    """The bytes that live tensors of the device hold, counted at every call."""
    index = index_of(device)
    held: dict[int, int] = {}
    for value in gc.get_objects():
        if type(value) is virtual.VirtualTensor and value._home.index == index:
            held[compat.memory_id(value._inner)] = value._inner.untyped_storage().nbytes()
    total = sum(held.values())
    _peaks[index] = max(_peaks.get(index, 0), total)
    return total


def max_memory_allocated(device: Any = None) -> int:
    """The largest result of :func:`memory_allocated` so far; nothing is counted in between."""
    memory_allocated(device)
    return _peaks[index_of(device)]


def reset_peak_memory_stats(device: Any = None) -> None:
    _peaks.pop(index_of(device), None)


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return f"{get_device_name(device)}: {memory_allocated(device)} bytes are held by tensors"


def nothing(*unused: Any, **more: Any) -> None:
    """There is nothing to do on a virtual device."""


# Random numbers of virtual devices are the host's, so that one seed and one state serve all. These are functions, not
# the generator's methods: Dynamo wants another object behind each name of torch and torch.cuda.


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def seed() -> None:
    torch.default_generator.seed()


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [torch.default_generator.get_state() for _ in range(virtual.count())]


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(new_state)


def set_rng_state_all(new_states: Any) -> None:
    for state in new_states:
        set_rng_state(state)
