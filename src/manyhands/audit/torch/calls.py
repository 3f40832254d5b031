"""Which calls of PyTorch make the host wait, and when: the table that :mod:`.hooks` wraps.

Each rule takes a call's arguments and says what it would do: a :class:`Wait`, or None where it does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from manyhands.audit.kinds import Kind
from manyhands.backends.torch.compat import FakeTensor
from manyhands.backends.torch.virtual import VirtualTensor


class Wait(NamedTuple):
    """What a call is about to do."""

    kind: Kind
    nbytes: int


Rule = Callable[[tuple[Any, ...], dict[str, Any]], "Wait | None"]


def on_device(value: object) -> bool:
    """Whether it is a tensor on a GPU, or on a virtual device that stands in for one."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return False
    return isinstance(value, VirtualTensor) or not (value.is_cpu or value.is_meta)


def is_device(device: object) -> bool:
    """Whether it names a GPU, or a virtual device that stands in for one."""
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            return False
    if not isinstance(device, torch.device) or device.type == "meta":
        return False
    return device.type != "cpu" or device.index is not None


def is_pinned(tensor: torch.Tensor) -> bool:
    return torch.cuda.is_available() and tensor.is_pinned()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _about(kind: Kind, tensor: torch.Tensor, nbytes: int | None = None) -> Wait:
    return Wait(kind, _size(tensor) if nbytes is None else nbytes)


def of_first(kind: Kind) -> Rule:
    """It waits if its first argument is on a device."""

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
        tensor: Any = args[0] if args else kwargs.get("input")
        return _about(kind, tensor) if on_device(tensor) else None

    return rule


def of_any(kind: Kind) -> Rule:
    """It waits if one of its arguments is on a device."""

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
        tensor = next((value for value in (*args, *kwargs.values()) if on_device(value)), None)
        return None if tensor is None else _about(kind, tensor)

    return rule


def numpy_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    return _about(Kind.TO_HOST, args[0]) if kwargs.get("force") and on_device(args[0]) else None


def to_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    """``x.to(...)``: a copy between the host and a device."""
    target = kwargs.get("device", kwargs.get("other"))
    if target is None and len(args) > 1:
        target = args[1]
    if isinstance(target, torch.dtype) or target is None:
        return None
    if isinstance(target, torch.Tensor):
        target = target.device
    return wait_of_move(args[0], target, _is_non_blocking(args[2:], kwargs))


def cuda_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    return wait_of_move(args[0], "cuda", _is_non_blocking(args[1:], kwargs))


def _is_non_blocking(options: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``non_blocking``: the first flag among the options, or a keyword."""
    flags = [option for option in options if isinstance(option, bool)]
    return bool(kwargs.get("non_blocking", flags[0] if flags else False))


def cpu_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    return wait_of_move(args[0], "cpu", non_blocking=False)


def wait_of_move(tensor: torch.Tensor, target: object, non_blocking: bool) -> Wait | None:
    """What a copy of a tensor to a device does to the host."""
    from_device, to_device = on_device(tensor), is_device(target)
    if from_device and not to_device:
        # With non_blocking=True PyTorch copies into pinned memory and does not wait.
        return None if non_blocking else _about(Kind.TO_HOST, tensor)
    if from_device or not to_device or isinstance(tensor, FakeTensor) or tensor.is_meta:
        return None
    return _to_device(tensor, non_blocking)


def _to_device(tensor: torch.Tensor, non_blocking: bool) -> Wait | None:
    if not is_pinned(tensor):
        return Wait(Kind.TO_DEVICE, _size(tensor))
    return None if non_blocking else Wait(Kind.BLOCKING, _size(tensor))


def copy_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    """``target.copy_(source)``."""
    if len(args) < 2 or not isinstance(args[1], torch.Tensor):
        return None
    target, source = args[0], args[1]
    non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    if on_device(source) and not on_device(target):
        if non_blocking and is_pinned(target):
            return None
        return _about(Kind.TO_HOST if not non_blocking else Kind.TO_DEVICE, source)
    if on_device(target) and not on_device(source):
        return _to_device(source, non_blocking)
    return None


def getitem_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    tensor, index = args
    return None if type(index) in (int, slice) else _index(tensor, index)


def _index(tensor: torch.Tensor, index: Any) -> Wait | None:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, torch.Tensor) and part.dim() == 0:
            if on_device(part):
                return _about(Kind.READ, tensor, part.element_size())  # x[i] with a 0-dim tensor i is an integer
        elif not on_device(tensor):  # what indexes a tensor of the host is on the host
            continue
        elif isinstance(part, torch.Tensor):
            if not on_device(part):
                return _about(Kind.IMPLICIT, tensor, _size(part))
            if part.dtype in (torch.bool, torch.uint8):
                return _about(Kind.SHAPE, tensor)
        elif isinstance(part, (list, range)) or (type(part).__module__ == "numpy" and part.ndim > 0):
            return _about(Kind.IMPLICIT, tensor, 8 * len(part))
    return None


def setitem_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    tensor, index, value = args
    if not on_device(tensor):
        return _about(Kind.TO_HOST, value) if on_device(value) else _index(tensor, index)
    parts = index if isinstance(index, tuple) else (index,)
    if isinstance(value, torch.Tensor):
        if not on_device(value) and value.dim() > 0:
            return _about(Kind.IMPLICIT, tensor, _size(value))
        if value.numel() == 1 and any(_is_mask(part) for part in parts):
            return None  # filled under the mask
    elif all(type(part) is int for part in parts):
        # One element is set by a copy of one number from the host; more are filled by a kernel.
        return _about(Kind.DATA, tensor, tensor.element_size()) if len(parts) == tensor.dim() else None
    elif any(_is_mask(part) for part in parts):
        return None
    return _index(tensor, index)


def _is_mask(part: object) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)


def where_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    """``torch.where(condition)`` alone returns indices, as many as are true."""
    return of_first(Kind.SHAPE)(args, kwargs) if len(args) + len(kwargs) == 1 else None


def repeat_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    if kwargs.get("output_size") is not None:
        return None
    repeats: Any = args[1] if len(args) > 1 else kwargs.get("repeats", args[0] if args else None)
    return _about(Kind.SHAPE, repeats) if on_device(repeats) else None


def one_hot_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return of_first(Kind.SHAPE)(args, kwargs) if classes == -1 else None


def data_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    """``torch.tensor(data, device=...)``: made on the host, then copied. Tensors in a list are read one by one."""
    device = kwargs.get("device")
    if device is None:
        device = torch.get_default_device()
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, (list, tuple)) and any(map(on_device, data[:8])):  # not all: a list of numbers may be long
        return Wait(Kind.READ, 8 * _length(data))
    if not is_device(device) or on_device(data):
        return None
    if isinstance(data, torch.Tensor):
        return Wait(Kind.TO_DEVICE, _size(data))
    is_array = type(data).__module__ == "numpy"
    nbytes = int(getattr(data, "nbytes", 0)) if is_array else 8 * _length(data)
    return Wait(Kind.TO_DEVICE if is_array else Kind.DATA, nbytes)


def new_tensor_rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Wait | None:
    device = kwargs.get("device")
    if on_device(args[0]) if device is None else is_device(device):
        return Wait(Kind.DATA, 8 * _length(args[1]))
    return None


def _length(data: object) -> int:
    return len(data) * (_length(data[0]) if data else 0) if isinstance(data, (list, tuple)) else 1


METHODS: dict[str, Rule] = {
    **dict.fromkeys(("item", "__float__", "__int__", "__index__", "__complex__", "tolist"), of_first(Kind.READ)),
    **dict.fromkeys(("__bool__", "is_nonzero", "__contains__"), of_first(Kind.CONTROL_FLOW)),
    **dict.fromkeys(("equal", "allclose"), of_any(Kind.CONTROL_FLOW)),
    **dict.fromkeys(("__repr__", "__format__"), of_first(Kind.PRINT)),
    **dict.fromkeys(
        ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"), of_first(Kind.SHAPE)
    ),
    "repeat_interleave": repeat_rule,
    "cpu": cpu_rule,
    "numpy": numpy_rule,
    "to": to_rule,
    "cuda": cuda_rule,
    "copy_": copy_rule,
    "__getitem__": getitem_rule,
    "__setitem__": setitem_rule,
    "new_tensor": new_tensor_rule,
}
FUNCTIONS: dict[str, Rule] = {
    **dict.fromkeys(
        ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"), of_first(Kind.SHAPE)
    ),
    **dict.fromkeys(("equal", "allclose"), of_any(Kind.CONTROL_FLOW)),
    "is_nonzero": of_first(Kind.CONTROL_FLOW),
    "where": where_rule,
    "repeat_interleave": repeat_rule,
    **dict.fromkeys(("tensor", "as_tensor", "asarray"), data_rule),
}
OF_LINALG = ("cholesky", "inv", "solve", "eigh", "det", "slogdet")
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)
