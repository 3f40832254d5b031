"""A backend without a framework: lists of numbers, as many devices as wanted, faults on demand.

The core's own tests run on it in milliseconds, on machines with no framework, and can see what real
hardware hides: how often something was copied, what happens when a device vanishes, when a tensor
lands somewhere else, or when a copy is still under way.

>>> backend = FakeBackend(gpus=2)
>>> backend.move(FakeTensor([1.0, 2.0]), FakeDevice("gpu", 1))
FakeTensor([1.0, 2.0], gpu:1)
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

from manyhands.backends.protocol import Arrival, Capabilities
from manyhands.device import Device, DeviceRecord, Kind, Memory
from manyhands.errors import NoSuchDevice


@dataclass(frozen=True)
class FakeDevice:
    kind: Kind
    index: int = 0


HOST = FakeDevice("cpu")
Numbers: TypeAlias = "list[Any]"  # of numbers or of rows; of a tensor without axes a number


class FakeTensor:
    """A list of numbers (or of rows) on a device."""

    def __init__(self, data: Numbers, device: FakeDevice = HOST) -> None:
        self.data = data
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        sizes: list[int] = []
        part: Any = self.data
        while isinstance(part, list):
            sizes.append(len(part))
            part = part[0] if part else None
        return tuple(sizes)

    def __repr__(self) -> str:
        return f"FakeTensor({self.data}, {Device(self.device.kind, self.device.index)})"


class FakeModel:
    """A model: named tensors."""

    def __init__(self, **tensors: FakeTensor) -> None:
        self.tensors = tensors


@dataclass
class Faults:
    """What shall go wrong."""

    # Placements on these devices land on the host, as TensorFlow's soft placement does.
    lands_on_host: set[FakeDevice] = field(default_factory=set)
    # Asynchronous work that has failed and will say so at the next wait.
    pending_error: Exception | None = None
    # Asynchronous moves do not arrive before they are waited for.
    slow: bool = False
    # What is put together of several shards lands on the host.
    joins_on_host: bool = False


class FakeBackend:
    """Follows :class:`manyhands.backends.protocol.Backend`; counts what it does in ``calls``."""

    name = "fake"
    CAPABILITIES = Capabilities(
        host_beside_virtual=True,
        virtual_can_end=True,
        virtual_as_cuda=False,
        moves_models=True,
        pins_memory=False,
        plans_lanes=False,
    )

    def __init__(self, gpus: int = 0, faults: Faults | None = None) -> None:
        self.gpus = gpus
        self.virtual = 0
        self.faults = faults or Faults()
        self.calls: list[str] = []
        self.waited_for: list[FakeDevice | None] = []

    # Devices

    def cpu(self) -> FakeDevice:
        return HOST

    def gpu(self, index: int) -> FakeDevice:
        return FakeDevice("virtual" if self.virtual else "gpu", index)

    def num_gpus(self) -> int:
        return self.virtual or self.gpus

    def is_device(self, value: object) -> TypeGuard[FakeDevice]:
        return isinstance(value, FakeDevice)

    def exists(self, device: FakeDevice) -> bool:
        return device.kind == "cpu" or device.index < self.num_gpus()

    def neutral(self, device: FakeDevice) -> Device:
        return Device(device.kind, device.index)

    def describe(self, device: FakeDevice) -> DeviceRecord:
        return DeviceRecord(self.neutral(device), "Fake device", f"FAKE-{device.index}", Memory(1000, 600), "1.0")

    def virtual_devices(self, count: int, as_cuda: bool | None = None) -> None:
        self.virtual = count

    def end_virtual_devices(self) -> None:
        self.virtual = 0

    def virtual_count(self) -> int:
        return self.virtual

    def virtual_device(self, index: int) -> FakeDevice | None:
        return FakeDevice("virtual", index) if index < self.virtual else None

    # Tensors

    def is_tensor(self, value: object) -> TypeGuard[FakeTensor]:
        return isinstance(value, FakeTensor)

    def device_of(self, tensor: FakeTensor) -> FakeDevice:
        return tensor.device

    def is_on(self, tensor: FakeTensor, device: FakeDevice) -> bool:
        return tensor.device == device

    def all_on(self, values: Sequence[object], device: FakeDevice) -> bool:
        return all(isinstance(value, FakeTensor) and value.device == device for value in values)

    def move(self, tensor: FakeTensor, device: FakeDevice) -> FakeTensor:
        self.calls.append("move")
        return self._new(tensor, device)

    def start_move(self, tensor: FakeTensor, device: FakeDevice) -> Arrival[FakeTensor]:
        self.calls.append("start_move")
        waited: list[bool] = []

        def finish() -> FakeTensor:
            waited.append(True)
            self.synchronize(device)
            return self._new(tensor, device)

        return Arrival(finish, lambda: not self.faults.slow or bool(waited))

    def copy(self, tensor: FakeTensor, device: FakeDevice) -> FakeTensor:
        self.calls.append("copy")
        return self._new(tensor, device)

    def rows(self, tensor: FakeTensor) -> int | None:
        return len(tensor.data) if isinstance(tensor.data, list) else None

    def cut(self, tensor: FakeTensor, start: int, stop: int) -> FakeTensor:
        return FakeTensor(tensor.data[start:stop], tensor.device)

    def join(self, tensors: Sequence[FakeTensor]) -> FakeTensor:
        where = HOST if self.faults.joins_on_host else tensors[0].device
        return FakeTensor([row for tensor in tensors for row in tensor.data], where)

    def synchronize(self, device: FakeDevice | None) -> None:
        self.calls.append("synchronize")
        self.waited_for.append(device)
        error, self.faults.pending_error = self.faults.pending_error, None
        if error is not None:
            raise error

    # Models

    def is_model(self, value: object) -> TypeGuard[FakeModel]:
        return isinstance(value, FakeModel)

    def model_tensors(self, model: FakeModel) -> Iterable[tuple[str, FakeTensor]]:
        return model.tensors.items()

    def move_model(self, model: FakeModel, device: FakeDevice) -> FakeModel:
        model.tensors = {name: self._new(tensor, device) for name, tensor in model.tensors.items()}
        return model

    # Measuring

    def random(self, shape: tuple[int, ...], dtype: str, device: FakeDevice) -> FakeTensor:
        def fill(sizes: tuple[int, ...]) -> Any:
            return [fill(sizes[1:]) for _ in range(sizes[0])] if sizes else random.random()

        return FakeTensor(fill(shape), device)

    def matmul(self, left: FakeTensor, right: FakeTensor) -> FakeTensor:
        columns = list(zip(*right.data, strict=True))
        product = [[sum(a * b for a, b in zip(row, col, strict=True)) for col in columns] for row in left.data]
        return FakeTensor(product, left.device)

    def pin(self, tensor: FakeTensor) -> FakeTensor:
        return tensor

    def _new(self, tensor: FakeTensor, device: FakeDevice) -> FakeTensor:
        if device.index >= max(1, self.num_gpus()):
            raise NoSuchDevice(f"{device} has vanished")
        data = list(tensor.data) if isinstance(tensor.data, list) else tensor.data
        return FakeTensor(data, HOST if device in self.faults.lands_on_host else device)
