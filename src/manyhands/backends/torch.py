"""PyTorch.

A GPU is a CUDA (or ROCm) device. Virtual devices are in ``torch_virtual``: PyTorch has no numbered CPUs
of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from manyhands import machine
from manyhands.backend import Arrival, Capabilities
from manyhands.backends import torch_virtual
from manyhands.device import Device, DeviceRecord, Memory
from manyhands.errors import ChangedInFlight

name = "torch"
CAPABILITIES = Capabilities(
    host_beside_virtual=True,
    virtual_at_any_time=True,
    refuses_mixed_devices=True,
    moves_models=True,
    pins_memory=True,
    tells_uuid=True,
)

_CPU = torch.device("cpu")
_side_streams: dict[int, torch.cuda.Stream] = {}


# Devices


def cpu() -> torch.device:
    return _CPU


def gpu(index: int) -> torch.device:
    return torch.device("cpu" if torch_virtual.count() else "cuda", index)


def num_gpus() -> int:
    return torch_virtual.count() or torch.cuda.device_count()


def is_device(value: object) -> bool:
    return isinstance(value, torch.device)


def neutral(device: torch.device) -> Device:
    if device.type == "cpu":
        return Device("cpu") if device.index is None else Device("virtual", device.index)
    return Device("gpu", device.index or 0)


def describe(device: torch.device) -> DeviceRecord:
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return DeviceRecord(neutral(device), machine.host_name(), None, machine.host_memory(), capability)
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceRecord(
        device=neutral(device),
        name=properties.name,
        uuid=f"GPU-{properties.uuid}",
        memory=Memory(total=total, free=free),
        capability=f"{properties.major}.{properties.minor}",
    )


def virtual_devices(count: int) -> None:
    torch_virtual.start(count)


def virtual_count() -> int:
    return torch_virtual.count()


# Tensors


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def device_of(tensor: torch.Tensor) -> torch.device:
    return tensor.device


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device == device or tensor.device == _numbered(device)


def all_on(values: Sequence[object], device: torch.device) -> bool:
    device = _numbered(device)
    return all(isinstance(value, torch.Tensor) and value.device == device for value in values)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch_virtual.place(tensor, device) if device.type == "cpu" else tensor.to(_numbered(device))


def copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cpu" and tensor.device.type == "cpu":
        return torch_virtual.place(tensor.clone(), device)
    return tensor.to(_numbered(device), copy=True)


def start_move(tensor: torch.Tensor, device: torch.device) -> Arrival[torch.Tensor]:
    device = _numbered(device)
    if tensor.device.type == device.type == "cpu":
        moved = move(tensor, device)
        return Arrival(lambda: moved, lambda: True)
    if device.type == "cpu":
        return _start_to_host(tensor)
    return _start_to_gpu(tensor, device)


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
        torch.cuda.synchronize(_numbered(device))


# Models


def is_model(value: object) -> bool:
    return isinstance(value, torch.nn.Module)


def model_tensors(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def move_model(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    return model.to(_numbered(device))


# Measuring


def random(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    return move(torch.randn(shape, dtype=getattr(torch, dtype)), device)


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left @ right


def pin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()


# How asynchronous moves stay safe: a stream of their own, so that they run beside the computation; the
# allocator is told of every tensor that a second stream uses; page-locked memory on the host side; and an
# event that `result()` waits for.


def _start_to_host(tensor: torch.Tensor) -> Arrival[torch.Tensor]:
    stream = _side_stream(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        arriving = torch.empty_like(tensor, device="cpu", pin_memory=True)
        arriving = arriving.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        arrived = stream.record_event()

    def finish() -> torch.Tensor:
        arrived.synchronize()
        return arriving

    return Arrival(finish, arrived.query)


def _start_to_gpu(tensor: torch.Tensor, device: torch.device) -> Arrival[torch.Tensor]:
    stream = _side_stream(device)
    from_host = tensor.device.type == "cpu"
    # A pageable source is staged now, so that writing to it later is harmless. A pinned one is read in place.
    source = tensor if not from_host or tensor.is_pinned() else tensor.pin_memory()
    version = source._version
    if not from_host:
        stream.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(stream):
        arriving = source.to(device, non_blocking=True)
        if not from_host:
            source.record_stream(stream) if source.device == device else _keep_for_peer(source, stream)
        arrived = stream.record_event()

    def finish() -> torch.Tensor:
        if source._version != version:
            raise ChangedInFlight(
                "the source of an asynchronous move was written to before result() was called: the copy may hold a mix "
                "of old and new. Call result() first, or write to another buffer in turn"
            )
        current = torch.cuda.current_stream(device)
        current.wait_event(arrived)
        arriving.record_stream(current)
        return arriving

    return Arrival(finish, arrived.query)


def _keep_for_peer(source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Order the source device's own stream behind the copy, so that its memory is not reused too early."""
    torch.cuda.current_stream(source.device).wait_event(stream.record_event())


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    index = device.index or 0
    if index not in _side_streams:
        _side_streams[index] = torch.cuda.Stream(device)
    return _side_streams[index]


def _numbered(device: torch.device) -> torch.device:
    """`cuda` without a number is the first GPU for us; for torch it is the current one."""
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device
