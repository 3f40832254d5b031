"""What the verbs of :mod:`manyhands.placement.verbs` share: find devices, check leaves, move, and verify the move.

Everything here is generic over the backend; nothing here is public.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeGuard, TypeVar

from manyhands import tree
from manyhands.amounts import count_of
from manyhands.backends.protocol import Arrival, Backend, D, M, T
from manyhands.device import Device, check_distinct, no_such_device
from manyhands.errors import (
    BadBatch,
    BadDevice,
    ForeignTensor,
    FrameworkMissing,
    NoSuchDevice,
    NotATensor,
    PlacementFailed,
    SeveralDevices,
    type_in_words,
)

X = TypeVar("X")
Y = TypeVar("Y")

VIRTUAL_DEVICES = "MANYHANDS_VIRTUAL_DEVICES"


class Placement(Generic[T, D, M]):
    """Finding, checking and moving, on one framework."""

    def __init__(self, backend: Backend[T, D, M]) -> None:
        self.backend = backend

    def find_name(self, device: Device | str) -> D:
        """The framework's device of a name."""
        if isinstance(device, str):
            device = Device.parse(device)
        if not isinstance(device, Device):
            raise BadDevice(
                f"{device!r} is not a device of {self.backend.name}: give one of its own, or a name such as 'gpu:1'"
            )
        if device.kind == "gpu":
            return self.backend.gpu(device.index)
        if device == Device("cpu"):
            return self.backend.cpu()
        # The frameworks themselves call virtual:1 cpu:1, so both names are taken.
        virtual = self.backend.virtual_device(device.index)
        if virtual is not None:
            return virtual
        if device.kind == "cpu":
            raise BadDevice(
                f"{device} is not a device: the host is just 'cpu'. Did you mean 'virtual:{device.index}'? "
                f"{self._more_virtual(device.index)}"
            )
        raise NoSuchDevice(f"there is no {device}. {self._more_virtual(device.index)}")

    def _more_virtual(self, index: int) -> str:
        have = self.backend.virtual_count()
        virtual = count_of(have, "virtual device") if have else "no virtual devices"
        return f"This process has {virtual}: {VIRTUAL_DEVICES}={index + 1} makes {index + 1}"

    def find(self, device: D | Device | str) -> D:
        """The framework's device; raises if it does not exist."""
        native: D = device if self.backend.is_device(device) else self.find_name(device)  # type: ignore[arg-type]
        if not self.backend.exists(native):
            gpus = [self.backend.gpu(index) for index in range(self.backend.num_gpus())]
            raise no_such_device(self.backend.name, self.backend.neutral(native), map(self.backend.neutral, gpus))
        return native

    def names(self, devices: Iterable[D | Device | str]) -> list[str]:
        """How devices are printed: the same names in every framework.

        In most frameworks the host and ``virtual:0`` are one place: it is called what the caller calls it, unless
        another virtual device stands beside it.
        """
        neutrals = [self._neutral(device) for device in devices]
        shared = not self.backend.CAPABILITIES.host_beside_virtual
        if shared and any(device.kind == "virtual" for device in neutrals):
            neutrals = [Device("virtual", 0) if device == Device("cpu") else device for device in neutrals]
        return [str(device) for device in neutrals]

    def _neutral(self, device: D | Device | str) -> Device:
        """The neutral name of a device that exists."""
        neutral = self.backend.neutral(self.find(device))
        if self.backend.is_device(device):
            return neutral
        host = Device("cpu")
        return host if device == host or (isinstance(device, str) and Device.parse(device) == host) else neutral

    def distinct(self, devices: Sequence[D | Device | str]) -> list[D]:
        if isinstance(devices, (str, Device)) or self.backend.is_device(devices):
            raise BadDevice(f"a list of devices is needed, {devices!r} is one device: write [{devices!r}]")
        if not isinstance(devices, Iterable):
            raise BadDevice(f"a list of devices is needed, {devices!r} is none: for example mh.try_all_gpus()")
        devices = list(devices)
        check_distinct(self.names(devices))
        return [self.find(device) for device in devices]

    def is_tensor(self, leaf: object) -> TypeGuard[T]:
        """Whether a leaf is a tensor of this framework; raises for one of another framework."""
        if self.backend.is_tensor(leaf):
            return True
        if isinstance(leaf, Arrival):
            raise NotATensor("a move in progress is not a tensor yet: pass its result()")
        framework = _framework_of(leaf)
        if framework not in (None, self.backend.name):
            raise ForeignTensor(
                f"a {type(leaf).__module__}.{type(leaf).__name__} is not a tensor of {self.backend.name}: convert "
                f"it first ({_CONVERSIONS.get(self.backend.name, 'to one of its own')})"
            )
        return False

    def refuse_model(self, leaf: object, instead: str) -> None:
        if self.backend.is_model(leaf):
            raise NotATensor(f"{type_in_words(leaf)} is not a tensor but holds them, as a model does: {instead}")

    def to_leaf(self, leaf: X, native: D) -> X:
        """The leaf on a device that exists."""
        if self.is_tensor(leaf):
            return leaf if self.backend.is_on(leaf, native) else self.move(leaf, native)  # type: ignore[return-value]
        if not self.backend.is_model(leaf):
            return leaf
        moved = self.backend.move_model(leaf, native)
        for _, tensor in self.backend.model_tensors(moved):
            self.verify(tensor, native)
        return moved  # type: ignore[return-value]

    def move(self, tensor: T, native: D) -> T:
        return self.verify(self.backend.move(tensor, native), native)

    def verify(self, tensor: T, native: D) -> T:
        """The tensor; raises if it is not on that device."""
        if not self.backend.is_on(tensor, native):
            backend = self.backend
            raise PlacementFailed(
                f"{backend.name} was asked to put a tensor on {backend.neutral(native)} and put it on "
                f"{backend.neutral(backend.device_of(tensor))} instead. Does that device exist? "
                "See: manyhands devices"
            )
        return tensor

    def start_move(self, x: X, native: D) -> Arrival[X]:
        leaves, structure = tree.flatten(x)

        def start(leaf: object) -> Arrival[T] | Arrival[object]:
            if not self.is_tensor(leaf):
                self.refuse_model(leaf, "move it with mh.to(net, device), without wait=False")
                return Arrival(lambda: leaf, lambda: True)
            if self.backend.is_on(leaf, native):
                return Arrival(lambda: leaf, lambda: True)
            return self.backend.start_move(leaf, native)

        start_once = once_each(start)
        arrivals = [start_once(leaf) for leaf in leaves]

        def finish() -> X:
            arrived = [arrival.result() for arrival in arrivals]
            for leaf in arrived:
                if self.backend.is_tensor(leaf):
                    self.verify(leaf, native)
            same = all(new is old for new, old in zip(arrived, leaves, strict=True))
            return x if same else structure.unflatten(arrived)  # type: ignore[return-value]

        return Arrival(finish, lambda: all(arrival.ready() for arrival in arrivals))

    def placements(self, root: str, x: object) -> list[tuple[str, D]]:
        """Path and device of every tensor in an argument, also of the models in it."""
        leaves, structure = tree.flatten(x)
        placed: list[tuple[str, D]] = []
        for path, leaf in zip(tree.paths(structure, root), leaves, strict=True):
            if self.is_tensor(leaf):
                placed.append(self._where(path, leaf))
            elif self.backend.is_model(leaf):
                tensors = self.backend.model_tensors(leaf)
                placed.extend(self._where(f"{path}.{name}", tensor) for name, tensor in tensors)
        return placed

    def _where(self, path: str, tensor: T) -> tuple[str, D]:
        try:
            return path, self.backend.device_of(tensor)
        except SeveralDevices as error:
            raise SeveralDevices(f"{path}: {error}") from None

    def list_of(self, placed: list[tuple[str, D]]) -> str:
        """One line per tensor; on the device that has most of them only the first ones, to keep it readable."""
        lines: list[str] = []
        by_device: dict[str, list[str]] = {}
        for path, device in placed:
            by_device.setdefault(str(self.backend.neutral(device)), []).append(path)
        most = max(by_device, key=lambda name: len(by_device[name]))
        for device_name, device_paths in by_device.items():
            shown = device_paths[:8] if device_name == most else device_paths
            lines += [f"  {path}: {device_name}" for path in shown]
            if len(device_paths) > len(shown):
                lines.append(f"  ... and {len(device_paths) - len(shown)} more on {device_name}")
        return "\n".join(lines)

    def lengths(self, leaves: list[object], structure: tree.Structure) -> list[tuple[str, int]]:
        """Path and length of every tensor of a batch: all the same, or an error."""
        lengths: list[tuple[str, int]] = []
        for path, leaf in zip(tree.paths(structure, "batch"), leaves, strict=True):
            if not self.is_tensor(leaf):
                self.refuse_model(leaf, "a batch holds samples; mh.to(net, device) moves a model")
                continue
            rows = self.backend.rows(leaf)
            if rows is None:
                raise BadBatch(f"{path} is a scalar and has no samples to split: give it rows, or leave it out")
            lengths.append((path, rows))
        if not lengths:
            raise BadBatch("there is no tensor in the batch to split: give tensors with one row per sample")
        if len({rows for _, rows in lengths}) > 1:
            listing = ", ".join(f"{path} has {rows}" for path, rows in lengths)
            raise BadBatch(f"the parts of the batch do not have the same number of samples: {listing}")
        return lengths

    def shard(self, leaf: object, start: int, stop: int, native: D) -> object:
        if not self.backend.is_tensor(leaf):
            return leaf
        part = leaf if (start, stop) == (0, self.backend.rows(leaf)) else self.backend.cut(leaf, start, stop)
        return self.to_leaf(part, native)

    def join(self, path: str, column: Sequence[object], native: D) -> object:
        """Join one leaf of all shards: tensors of one kind, or the same value everywhere."""
        tensors = [part for part in column if self.is_tensor(part)]
        if not tensors:
            for i, part in enumerate(column):
                self.refuse_model(part, "shards hold samples; mh.to(net, device) moves a model")
                if not _same(part, column[0]):
                    raise BadBatch(f"{path} is {column[0]!r} in shard 0 and {part!r} in shard {i}: which one is it?")
            return column[0]
        if len(tensors) < len(column):
            raise BadBatch(f"{path} is a tensor in some shards and none in others: they are not parts of one batch")
        for i, tensor in enumerate(tensors):
            if self.backend.rows(tensor) is None:
                raise BadBatch(f"{path} is a scalar in shard {i}: there are no samples to put together")
        shapes = [tuple(tensor.shape)[1:] for tensor in tensors]
        if len(set(shapes)) > 1:
            listing = ", ".join(f"{shape} in shard {i}" for i, shape in enumerate(shapes))
            raise BadBatch(f"{path} has samples of different shapes: {listing}")
        parts = [self.to_leaf(tensor, native) for tensor in tensors]
        return parts[0] if len(parts) == 1 else self.verify(self.backend.join(parts), native)


def once_each(function: Callable[[object], Y]) -> Callable[[object], Y]:
    """Call the function once per object, so that a tensor that is in a tree twice stays one tensor."""
    done: dict[int, Y] = {}

    def remember(leaf: object) -> Y:
        key = id(leaf)
        if key not in done:
            done[key] = function(leaf)
        return done[key]

    return remember


def _same(first: object, second: object) -> bool:
    try:
        return first is second or bool(first == second)
    except Exception:  # arrays of strings compare element by element, others not at all
        return False


_CONVERSIONS = {
    "torch": "torch.as_tensor(x)",
    "jax": "jnp.asarray(x)",
    "tensorflow": "tf.convert_to_tensor(x)",
    "mxnet": "mx.np.array(x)",
}
_ARRAY_TYPES = {
    "torch": ("torch", "Tensor"),
    "jax": ("jax", "Array"),
    "tensorflow": ("tensorflow", "Tensor"),
    "mxnet": ("mxnet.ndarray", "NDArray"),
    "numpy": ("numpy", "ndarray"),
}


def _framework_of(leaf: object) -> str | None:
    """Which framework's array it is. Asks only those that the program has imported itself."""
    for framework, (module, attribute) in _ARRAY_TYPES.items():
        cls = getattr(sys.modules.get(module), attribute, None)
        if isinstance(cls, type) and isinstance(leaf, cls):
            # NumPy's arrays of strings and objects are not tensors of any framework.
            return framework if framework != "numpy" or leaf.dtype.kind in "biufc" else None  # type: ignore[attr-defined]
    return None


def is_installed(framework: str) -> bool:
    """Whether a framework can be imported (it is not imported here); a mere folder of that name does not count."""
    try:
        spec = importlib.util.find_spec(framework)
    except ValueError:  # the name is blocked: sys.modules[framework] is None
        return False
    return spec is not None and spec.origin is not None


def require(framework: str) -> None:
    """Raise with what to install if a framework is missing."""
    if not is_installed(framework):
        raise FrameworkMissing(
            f"manyhands.{framework} needs {framework}, which is not installed: pip install 'manyhands[{framework}]'",
            name=framework,
        )
