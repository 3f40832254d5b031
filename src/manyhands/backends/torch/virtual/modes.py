"""The modes that create tensors on virtual devices, in every thread; and the parameters of lazy layers.

Such a parameter has no shape yet. PyTorch keeps it as an empty tensor on its device. Here the empty tensor stays on the
host, and remembers on which device its weights are to be created.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from manyhands.backends.torch import compat
from manyhands.backends.torch.compat import (
    DeviceContext,
    DispatchModeWithoutDynamo,
    dispatch_mode_stack,
    function_mode_stack,
    no_dispatch_modes,
)
from manyhands.backends.torch.virtual.names import (
    HOST,
    actual,
    check_exists,
    count,
    is_virtual,
    of_thread,
    set_devices,
    shown_device,
    stands_in,
)
from manyhands.backends.torch.virtual.tensor import (
    VirtualTensor,
    become,
    compute,
    home,
    move,
    place,
    readable,
    swap_tensors,
)

_changes = ExitStack()  # what is replaced is put back exactly
# Functions that replace calls while virtual devices stand in for GPUs; :mod:`..cuda_stand_in` fills it.
instead: dict[Any, Callable[..., Any]] = {}
_TO = torch.ops.aten.to
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WITH_LENGTHS = (torch.ctc_loss, torch.nn.functional.ctc_loss)
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
_GET_DEVICE = torch.Tensor.device.__get__


def start(number: int, *, as_cuda: bool) -> None:
    """Make the devices ``cpu:0`` to ``cpu:<number - 1>``; Python sees ``cuda:0`` and so on where ``as_cuda``."""
    set_devices(number, as_cuda=as_cuda)
    changes: list[tuple[Any, str, Any]] = [
        (torch.utils, "swap_tensors", swap_tensors),  # Module.to() calls it by this name
        (threading.Thread, "start", _start_thread),  # modes hold for one thread
        *_of_lazy_parameters(),
    ]
    for owner, name, value in changes:
        _changes.enter_context(mock.patch.object(owner, name, value))
    enter_thread()


def stop() -> None:
    """Undo :func:`start`. Tensors that still exist stay usable; hooks of other threads no longer do anything."""
    _changes.close()
    set_devices(0, as_cuda=False)
    leave_thread()


def enter_thread() -> None:
    """Let this thread create tensors on virtual devices, until :func:`leave_thread`."""
    if not is_hooked():
        of_thread.hooks = (_Factories(), NameTranslation())  # type: ignore[no-untyped-call]
        for hook in of_thread.hooks:
            hook.__enter__()  # type: ignore[no-untyped-call]


def leave_thread() -> None:
    """Undo :func:`enter_thread`, unless other modes are on top: then the hooks stay, and do nothing without devices."""
    if of_thread.hooks:
        factories, names = of_thread.hooks
        of_thread.hooks = ()
        if dispatch_mode_stack()[-1:] == [factories] and function_mode_stack()[-1:] == [names]:
            names.__exit__(None, None, None)
            factories.__exit__(None, None, None)


@contextmanager
def hooks() -> Iterator[None]:
    """Let this thread create tensors on virtual devices, if there are any."""
    if not count():
        yield
        return
    with _Factories(), NameTranslation():  # type: ignore[no-untyped-call]
        yield


_start_plain_thread = threading.Thread.start


def _start_thread(thread: threading.Thread) -> None:
    """``Thread.start`` with our hooks in the new thread; lanes compute with what is inside and need none."""
    run = thread.run

    def run_with_hooks() -> None:
        try:
            with hooks():
                run()
        finally:
            thread.__dict__.pop("run", None)  # else the thread would hold itself

    if not thread.name.startswith("manyhands lane"):
        thread.run = run_with_hooks  # type: ignore[method-assign]
    _start_plain_thread(thread)


@contextmanager
def no_hooks() -> Iterator[None]:
    """Switch the hooks off, if there are virtual devices, so that operations see plain tensors."""
    if not count():
        yield
        return
    with no_dispatch_modes():
        yield


def is_hooked() -> bool:
    """Whether this thread has our hooks."""
    return any(isinstance(mode, _Factories) for mode in dispatch_mode_stack())


def only_hooks() -> bool:
    """Whether no dispatch mode but ours is active in this thread."""
    return all(isinstance(mode, _Factories) for mode in dispatch_mode_stack())


def only_known_functions() -> bool:
    """Whether no function mode is active in this thread but ours and PyTorch's own for the default device."""
    return all(isinstance(mode, (NameTranslation, DeviceContext)) for mode in function_mode_stack())


class _Factories(DispatchModeWithoutDynamo):
    """Sees operations without a virtual operand whose result is to be on a virtual device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not count():
            return func(*args, **kwargs)
        if func.overloadpacket is _TO:  # in inference mode it is not decomposed
            return move(func, args, kwargs)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        # PyTorch skips function modes inside its own Python functions, so that names of devices arrive here, too.
        device = actual(device)
        return compute(func, args, {**kwargs, "device": device}) if is_virtual(device) else func(*args, **kwargs)


class NameTranslation(TorchFunctionMode):
    """Translates names of devices before PyTorch looks for them; and sees ``x.data = y`` of an x on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not count():
            return func(*args, **kwargs)
        if stands_in() and func in instead:
            return instead[func](*args, **kwargs)
        args, device = _translate(func, args, kwargs)
        if device is not None:
            kwargs = {**kwargs, "device": device}
        if stands_in() and kwargs.get("pin_memory"):  # PyTorch would ask CUDA for the memory
            return mark_pinned(func(*args, **{**kwargs, "pin_memory": False}))
        if func in _WITH_LENGTHS:
            args, kwargs = _with_lengths_beside(args, kwargs)
        if func in _FROM_DATA and args:
            args = (readable(args[0]), *args[1:])
        if func in _FROM_DATA and device is not None and is_virtual(device):
            requires_grad = kwargs.pop("requires_grad", False)
            tensor = place(func(*args, **{**kwargs, "device": HOST}), device)
            return tensor.detach().requires_grad_() if requires_grad else tensor
        if args and isinstance(args[0], UninitializedTensorMixin):
            return _call_with_lazy(func, args, kwargs)
        if func == _SET_DATA and isinstance(args[1], VirtualTensor) and not isinstance(args[0], VirtualTensor):
            return become(*args)
        return func(*args, **kwargs)


def _with_lengths_beside(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a CTC loss with its lengths, which a GPU takes from the host, on the device of the others."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    log_probs = named.get("log_probs")
    if not isinstance(log_probs, VirtualTensor) or not named.keys() >= set(names):
        return args, kwargs
    for name in names[2:]:
        lengths = named[name]
        named[name] = place(lengths if isinstance(lengths, torch.Tensor) else torch.tensor(lengths), home(log_probs))
    return (*(named.pop(name) for name in names), *args[4:]), named


def _translate(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, torch.device | None]:
    """The arguments of a call, and its ``device=``, with the dispatcher's names of devices."""
    named = kwargs.get("device")
    if named is not None:
        return args, actual(named)
    if func in compat.device_constructors():
        default = _default_device()
        return args, None if default is None else actual(default)
    if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (torch.device, str, int)):
        args = (args[0], actual(args[1]), *args[2:])
    return args, None


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor of the host as page-locked, for ``x.is_pinned()``."""
    tensor.__dict__["_manyhands_pinned"] = True
    return tensor


def is_marked_pinned(tensor: torch.Tensor) -> bool:
    if "_manyhands_pinned" in tensor.__dict__:
        return True
    base = compat.base(tensor)
    return base is not None and "_manyhands_pinned" in base.__dict__


# Parameters of lazy layers


def _of_lazy_parameters() -> Iterator[tuple[Any, str, Any]]:
    """The methods of PyTorch's lazy parameters that are replaced while there are virtual devices."""
    yield UninitializedTensorMixin, "materialize", materialize  # a lazy layer's first call
    for kind in (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer):
        yield kind, "__new__", _made_on_virtual(kind.__new__)  # LazyLinear(..., device="cuda:1")
    # A buffer does not define it: torch.Tensor's raises.
    parameter = torch.nn.UninitializedParameter
    yield parameter, "__deepcopy__", _wrap_deepcopy(parameter.__deepcopy__)


def _call_with_lazy(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Handle a call with a parameter that has no shape yet: remember a move."""
    tensor = args[0]
    if func == _GET_DEVICE and "_future_home" in tensor.__dict__:
        return shown_device(tensor._future_home)
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
        named = bound.arguments.get("device") or _default_device()
        where = HOST if named is None else actual(named)
        if not is_virtual(where):
            return new(*args, **kwargs)
        check_exists(where)
        bound.arguments["device"] = HOST
        parameter = new(*bound.args, **bound.kwargs)
        parameter._future_home = where
        return parameter

    return new_on_virtual


def _wrap_deepcopy(deepcopy: Callable[..., Any]) -> Callable[..., Any]:
    def deepcopy_with_home(tensor: Any, memo: dict[int, Any]) -> Any:
        copy = deepcopy(tensor, memo)
        if "_future_home" in tensor.__dict__:
            copy._future_home = tensor._future_home
        return copy

    return deepcopy_with_home


def _default_device() -> torch.device | None:
    """The default device, if one is set: PyTorch adds it to a call only after our hook."""
    return next((mode.device for mode in function_mode_stack() if isinstance(mode, DeviceContext)), None)
