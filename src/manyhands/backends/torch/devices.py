"""PyTorch's adapter: its devices, and how tensors and models get to them (:mod:`manyhands.backends.protocol`).

A GPU is a CUDA (or ROCm) device; PyTorch's other kinds (``meta``, ``mps``, ``xpu``) are not supported. Virtual devices
are in :mod:`.virtual`: PyTorch has no numbered CPUs. A ``PackedSequence`` is moved as a whole, as a model is: PyTorch
keeps a part of it on the host, so only its own ``.to`` moves it correctly.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TypeGuard

import torch
from torch.nn.utils.rnn import PackedSequence

from manyhands import machine, tree
from manyhands.backends.protocol import Arrival, Capabilities
from manyhands.backends.torch import compat, virtual
from manyhands.device import Device, DeviceRecord, Memory
from manyhands.errors import BadDevice, ChangedInFlight

name = "torch"
CAPABILITIES = Capabilities(
    host_beside_virtual=True,
    virtual_can_end=True,
    virtual_as_cuda=True,
    moves_models=True,
    pins_memory=True,
    plans_lanes=True,
)

_CPU = torch.device("cpu")
_side_streams: dict[int, torch.cuda.Stream] = {}
tree.keep_whole(PackedSequence)


# Devices


def cpu() -> torch.device:
    return _CPU


def gpu(index: int) -> torch.device:
    return virtual.device(index) if virtual.count() else torch.device("cuda", index)


def num_gpus() -> int:
    return virtual.count() or torch.cuda.device_count()


def is_device(value: object) -> TypeGuard[torch.device]:
    return isinstance(value, torch.device)


def exists(device: torch.device) -> bool:
    known = neutral(device)
    return known.kind == "cpu" or known.index < num_gpus()


def neutral(device: torch.device) -> Device:
    device = _with_number(device)
    if device.type == "cpu":
        return Device("cpu") if device.index is None else Device("virtual", device.index)
    if device.type == "cuda":
        return Device("virtual" if virtual.stands_in() else "gpu", device.index)
    raise BadDevice(f"{str(device)!r} is neither the CPU nor a GPU of CUDA or ROCm: those are known here")


def describe(device: torch.device) -> DeviceRecord:
    if device.type == "cpu" or virtual.stands_in():
        return machine.describe_cpu(neutral(device))
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceRecord(
        device=neutral(device),
        name=properties.name,
        uuid=f"GPU-{properties.uuid}",
        memory=Memory(total=total, free=free),
        capability=f"{properties.major}.{properties.minor}",
    )


def virtual_devices(count: int, as_cuda: bool | None = None) -> None:
    """``as_cuda`` None: they stand in for GPUs also in PyTorch's own names where there is no GPU."""
    stand_in = not torch.cuda.is_available() if as_cuda is None else as_cuda
    virtual.start(count, as_cuda=stand_in)
    if stand_in:
        cuda_stand_in().start()


def end_virtual_devices() -> None:
    if virtual.stands_in():
        cuda_stand_in().stop()
    virtual.stop()


def cuda_stand_in() -> ModuleType:
    """Loaded where it is needed: most programs do without."""
    return importlib.import_module("manyhands.backends.torch.cuda_stand_in.replaced")


def virtual_count() -> int:
    return virtual.count()


def virtual_device(index: int) -> torch.device | None:
    return virtual.device(index) if index < virtual.count() else None


# Tensors


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def device_of(tensor: torch.Tensor) -> torch.device:
    return tensor.device


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    # While a function is traced, a tensor of a virtual device tells the dispatcher's name of it.
    return tensor.device in (device, _with_number(device), virtual.actual(device))


def all_on(values: Sequence[object], device: torch.device) -> bool:
    device = _with_number(device)
    return all(isinstance(value, torch.Tensor) and value.device == device for value in values)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    device = _with_number(device)
    return virtual.place(tensor, device) if device.type == "cpu" or virtual.stands_in() else tensor.to(device)


def copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    device = _with_number(device)
    if virtual.stands_in() or device.type == tensor.device.type == "cpu":
        return virtual.place(tensor.clone(), device)
    return tensor.to(device, copy=True)


def start_move(tensor: torch.Tensor, device: torch.device, *, source_is_final: bool = False) -> Arrival[torch.Tensor]:
    """Where the source is page-locked host memory of the caller's, ``result()`` waits until it has been read.

    ``source_is_final``: nobody writes to the source any more, so on the way to a GPU the host never waits.
    """
    device = _with_number(device)
    # Sparse and nested tensors are several pieces of memory, for which PyTorch has no page-locked form.
    in_pieces = tensor.layout != torch.strided or tensor.is_nested
    if in_pieces or virtual.stands_in() or tensor.device.type == device.type == "cpu":
        moved = move(tensor, device)
        return Arrival(lambda: moved, lambda: True)
    if device.type == "cpu":
        return _start_to_host(tensor)
    return _start_to_gpu(tensor, device, source_is_final=source_is_final)


def rows(tensor: torch.Tensor) -> int | None:
    return tensor.shape[0] if tensor.dim() else None


def cut(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return tensor[start:stop]


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(tensors))


def synchronize(device: torch.device | None) -> None:
    if device is None:
        if torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
    elif device.type == "cuda":
        torch.cuda.synchronize(_with_number(device))


# Models


def is_model(value: object) -> TypeGuard[torch.nn.Module | PackedSequence]:
    return isinstance(value, (torch.nn.Module, PackedSequence))


def model_tensors(model: torch.nn.Module | PackedSequence) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(model, PackedSequence):
        parts = {name: getattr(model, name) for name in ("data", "sorted_indices", "unsorted_indices")}
        yield from ((name, part) for name, part in parts.items() if part is not None)
        return
    yield from model.named_parameters()
    yield from model.named_buffers()


def move_model(model: torch.nn.Module | PackedSequence, device: torch.device) -> torch.nn.Module | PackedSequence:
    with virtual.hooks():
        return model.to(_with_number(device))  # type: ignore[arg-type]  # PyTorch declares PackedSequence's for dtypes only


# Measuring


def random(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    return move(torch.randn(shape, dtype=getattr(torch, dtype)), device)


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


def pin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()


# How asynchronous moves stay safe: a stream of their own, so that they run beside the computation; the
# allocator is told of every tensor that a second stream uses; page-locked memory on the host side; an event
# that `result()` waits for; and a source that was written to meanwhile is an error.


def _start_to_host(tensor: torch.Tensor) -> Arrival[torch.Tensor]:
    version = _version(tensor)
    stream = _side_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        arriving = torch.empty_like(tensor, device="cpu", pin_memory=True)
        arriving = arriving.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        arrived = stream.record_event()

    def finish() -> torch.Tensor:
        _check_unchanged(tensor, version)
        arrived.synchronize()
        return arriving

    return Arrival(finish, arrived.query)


def _start_to_gpu(tensor: torch.Tensor, device: torch.device, *, source_is_final: bool) -> Arrival[torch.Tensor]:
    stream = _side_stream(device)
    from_host = tensor.device.type == "cpu"
    # A pageable source is staged now, so that writing to it later is harmless. A pinned one is read in place.
    staged = from_host and not tensor.is_pinned()
    source = tensor.pin_memory() if staged else tensor
    exposed = from_host and not staged and not source_is_final
    version = _version(source)
    if not from_host:
        stream.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(stream):
        arriving = source.to(device, non_blocking=True)
        if not from_host:
            source.record_stream(stream) if source.device == device else _keep_for_peer(source, stream)
        arrived = stream.record_event()

    def finish() -> torch.Tensor:
        _check_unchanged(source, version)
        if exposed:
            # The owner may write to it as soon as he has the result, and the device's order does not bind the host.
            arrived.synchronize()
        current = torch.cuda.current_stream(device)
        current.wait_event(arrived)
        arriving.record_stream(current)
        return arriving

    return Arrival(finish, arrived.query)


def _version(tensor: torch.Tensor) -> int | None:
    """How often it was written to; PyTorch does not count that for tensors made in inference mode."""
    return None if tensor.is_inference() else compat.write_count(tensor)


def _check_unchanged(source: torch.Tensor, version: int | None) -> None:
    if _version(source) != version:
        raise ChangedInFlight(
            "the source of an asynchronous move was written to before result() was called: the copy may hold a mix "
            "of old and new. Call result() first, or write to another buffer in turn"
        )


def _keep_for_peer(source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Order the source device's own stream behind the copy, so that its memory is not reused too early."""
    torch.cuda.current_stream(source.device).wait_event(stream.record_event())


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    index = device.index or 0
    if index not in _side_streams:
        _side_streams[index] = torch.cuda.Stream(device)
    return _side_streams[index]


def _with_number(device: torch.device) -> torch.device:
    """One name per device: `cuda` is the first GPU (for torch the current one), and `cpu:0` the host as long as
    there are no virtual devices."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", 0)
    if device.type == "cpu" and device.index is not None:
        return virtual.shown_device(device) if virtual.count() or device.index else _CPU
    return device
