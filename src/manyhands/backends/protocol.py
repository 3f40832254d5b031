"""The seam between manyhands and a framework: the few verbs on which everything else is built.

An adapter is a plain module, ``manyhands/backends/<framework>/devices.py``, with these functions. The type checker
holds it to the protocol at ``Verbs(backend)``. Adapters know nothing of trees, lists of devices or errors in users'
arguments: that is done once, in :mod:`manyhands.placement.verbs`. (They may ask for a class to be a
leaf: ``tree.keep_whole``.) What a framework cannot do stands in its :class:`Capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeGuard, TypeVar

from manyhands.device import Device, DeviceRecord


class Shaped(Protocol):
    """What every framework's tensors have."""

    @property
    def shape(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Shaped)  # the framework's tensor
D = TypeVar("D")  # the framework's device
M = TypeVar("M")  # the framework's model
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a framework can do, as data."""

    # The host's memory and virtual device 0 are two places (so that moving there is a copy).
    host_beside_virtual: bool
    # Virtual devices can be undone: `with virtual_devices(2):`.
    virtual_can_end: bool
    # The framework's own names for GPUs (torch.cuda) can mean virtual devices.
    virtual_as_cuda: bool
    # A model that exists can be moved (elsewhere it is built where it shall live).
    moves_models: bool
    # Page-locked host memory can be asked for.
    pins_memory: bool
    # parallel(fn): manyhands plans the lanes, and can draw, time and forecast the plan (elsewhere the framework's own
    # runtime schedules the function).
    plans_lanes: bool


class Arrival(Generic[V]):
    """A move under way, as ``to(x, device, wait=False)`` gives it.

    The value is inside, and the only way to it is :meth:`result`, which makes sure first that it is
    there. So it can be late, but never wrong.
    """

    __slots__ = ("_finish", "_ready", "_value")

    def __init__(self, finish: Callable[[], V], ready: Callable[[], bool]) -> None:
        self._finish: Callable[[], V] | None = finish
        self._ready = ready
        self._value: V

    def ready(self) -> bool:
        """Whether :meth:`result` would come back at once. Never waits."""
        return self._finish is None or self._ready()

    def result(self) -> V:
        """The value, safe to use on its device; and the source may be written to again.

        For a value that goes to the host this waits until it is there, unless the framework's own
        reading does (JAX, MXNet). For one that goes to a GPU the host does not wait: work issued on
        the device from now on comes after the copy. The exception is a page-locked source of yours in
        PyTorch, which is read in place: this waits until it has been read. For full speed do other
        work before the call, or give a pageable source, which is staged when the move is started.
        """
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
        return self._value

    def __repr__(self) -> str:
        return f"<Arrival: {'here' if self.ready() else 'under way'}; its result() is the value>"


class Devices(Protocol[D]):
    """What every framework must offer: its devices."""

    @property
    def name(self) -> str:
        """``torch``, ``jax``, ``tensorflow`` or ``mxnet``."""

    @property
    def CAPABILITIES(self) -> Capabilities: ...

    def cpu(self) -> D: ...

    def gpu(self, index: int) -> D:
        """GPU number ``index``, or virtual device ``index`` where those stand in for GPUs."""

    def num_gpus(self) -> int: ...

    def is_device(self, value: object, /) -> TypeGuard[D]: ...

    def exists(self, device: D, /) -> bool:
        """Whether the machine has it: some frameworks give devices that are not there."""

    def neutral(self, device: D, /) -> Device:
        """Its name in every framework. A CPU of a number is virtual: ``cpu`` is the host, where that is one place."""

    def describe(self, device: D, /) -> DeviceRecord: ...

    def virtual_devices(self, count: int, /, as_cuda: bool | None = None) -> None:
        """Make them, where there are none; ``as_cuda`` is None but for a framework with ``virtual_as_cuda``."""

    def end_virtual_devices(self) -> None:
        """Undo it; only where ``virtual_can_end``."""

    def virtual_count(self) -> int:
        """How many there are; 0 where GPUs are GPUs."""

    def virtual_device(self, index: int, /) -> D | None:
        """Virtual device ``index``, also one that the user has made by the framework's own means; None: it is not."""


class Backend(Devices[D], Protocol[T, D, M]):
    """What every framework must offer: its devices, and what is done with tensors and models on them."""

    # Tensors

    def is_tensor(self, value: object, /) -> TypeGuard[T]: ...

    def device_of(self, tensor: T, /) -> D: ...

    def is_on(self, tensor: T, device: D, /) -> bool: ...

    def all_on(self, values: Sequence[object], device: D, /) -> bool:
        """Whether all of them are tensors on that device: one tight loop, for large trees."""

    def move(self, tensor: T, device: D, /) -> T:
        """A tensor on another device with the same content, complete when this returns."""

    def start_move(self, tensor: T, device: D, /) -> Arrival[T]:
        """The same without waiting for it."""

    def copy(self, tensor: T, device: D, /) -> T:
        """New memory, on the same device too."""

    def rows(self, tensor: T, /) -> int | None:
        """The length of the first axis; None for a scalar."""

    def cut(self, tensor: T, start: int, stop: int, /) -> T: ...

    def join(self, tensors: Sequence[T], /) -> T: ...

    def synchronize(self, device: D | None, /) -> None: ...

    # Models

    def is_model(self, value: object, /) -> TypeGuard[M]: ...

    def model_tensors(self, model: M, /) -> Iterable[tuple[str, T]]:
        """Parameters and buffers with their paths."""

    def move_model(self, model: M, device: D, /) -> M: ...

    # Measuring

    def random(self, shape: tuple[int, ...], dtype: str, device: D, /) -> T:
        """Random numbers of a dtype (``float32``, ``bfloat16``) on a device."""

    def matmul(self, left: T, right: T, /) -> T: ...

    def pin(self, tensor: T, /) -> T:
        """The same content in page-locked host memory; only where ``pins_memory``."""
