"""Parameters of lazy layers, which have no shape yet, on a virtual device.

PyTorch keeps such a parameter as an empty tensor on its device. Here the empty tensor stays on the host, and remembers
on which device its weights are to be created.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from manyhands.backends.torch.compat import DeviceContext, function_mode_stack
from manyhands.backends.torch.virtual.names import HOST, actual, check_exists, is_virtual, shown
from manyhands.backends.torch.virtual.tensor import become, place

_GET_DEVICE = torch.Tensor.device.__get__


def replaced() -> Iterator[tuple[Any, str, Any]]:
    """The methods of PyTorch's lazy parameters that are replaced while there are virtual devices."""
    yield UninitializedTensorMixin, "materialize", materialize  # a lazy layer's first call
    for lazy in (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer):
        yield lazy, "__new__", _made_on_virtual(lazy.__new__)  # LazyLinear(..., device="cuda:1")
    # A buffer does not define it: torch.Tensor's raises.
    parameter = torch.nn.UninitializedParameter
    yield parameter, "__deepcopy__", _copied(parameter.__deepcopy__)


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Handle a call with a parameter that has no shape yet: remember a move."""
    tensor = args[0]
    if func == _GET_DEVICE and "_future_home" in tensor.__dict__:
        return shown(tensor._future_home)
    if func not in (torch.Tensor.to, torch.Tensor.cpu):
        return func(*args, **kwargs)
    wanted = HOST if func is torch.Tensor.cpu else kwargs.get("device", args[1] if len(args) > 1 else None)
    if not isinstance(wanted, torch.device):
        return func(*args, **kwargs)
    tensor.__dict__.pop("_future_home", None)
    if not is_virtual(wanted):
        return func(*args, **kwargs)
    check_exists(wanted)
    dtypes = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
    if dtypes:
        tensor.data = tensor.data.to(dtypes[0])
    tensor._future_home = wanted
    return tensor


def materialize(tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """``UninitializedParameter.materialize``: the weights are made where the empty tensor was moved to."""
    where = tensor.__dict__.get("_future_home") if device is None else actual(device)
    if where is None or not is_virtual(where):
        _materialize_plain(tensor, shape, device, dtype)
        return
    weights = place(torch.empty(shape, dtype=dtype or tensor.data.dtype, device=HOST), where)
    become(tensor, weights)


_materialize_plain = UninitializedTensorMixin.materialize


def _made_on_virtual(new: Callable[..., Any]) -> Callable[..., Any]:
    form = inspect.signature(new)

    def new_on_virtual(*args: Any, **kwargs: Any) -> Any:
        bound = form.bind(*args, **kwargs)
        named = bound.arguments.get("device") or default_device()
        where = HOST if named is None else actual(named)
        if not is_virtual(where):
            return new(*args, **kwargs)
        check_exists(where)
        bound.arguments["device"] = HOST
        parameter = new(*bound.args, **bound.kwargs)
        parameter._future_home = where
        return parameter

    return new_on_virtual


def _copied(deepcopy: Callable[..., Any]) -> Callable[..., Any]:
    def deepcopy_with_home(tensor: Any, memo: dict[int, Any]) -> Any:
        copy = deepcopy(tensor, memo)
        if "_future_home" in tensor.__dict__:
            copy._future_home = tensor._future_home
        return copy

    return deepcopy_with_home


def default_device() -> torch.device | None:
    """The default device, if one is set: PyTorch adds it to a call only after our hook."""
    return next((mode.device for mode in function_mode_stack() if isinstance(mode, DeviceContext)), None)
