"""Makes fake tensors, and the graph of a trace, faster than PyTorch does by default."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from manyhands.backends.torch.compat.dynamo import replaced

_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_quick = threading.RLock()  # held by the trace that describes its constants quickly


class RememberingFakeMode(FakeTensorMode):
    """Fake tensors for a trace whose function uses real tensors from outside, as a model uses its weights.

    PyTorch caches the results of operations on fake tensors by their forms, but not if one of the tensors is real: then
    it computes them again for every layer. So real tensors are made fake first, which PyTorch does a moment later
    anyway.

    Nor does it cache operations that write to their first argument and return it, which an optimizer calls for every
    weight. Here they are cached once PyTorch has accepted one for arguments of the same forms. And the result of batch
    normalisation, which PyTorch decomposes into thirty operations, follows from the form of its input.
    """

    def __init__(self) -> None:
        from torch._functorch import config
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # The settings of make_fx(tracing_mode="fake").
        with config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
            super().__init__(
                allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
            )
        self._accepted: set[Hashable] = set()  # writes to the first argument that PyTorch has accepted once

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = _kinds((*args, *(kwargs or {}).values()))
        # With real tensors alone PyTorch may know the numbers; and an operation that changes a form must not see fakes.
        if FakeTensor in kinds and kinds & _REAL and torch.Tag.inplace_view not in func.tags:
            args, kwargs = tree_map(self._as_fake, (args, kwargs))
        if func is _BATCH_NORM and not kwargs and _is_simple_norm(args):
            return self._batch_norm(args[0], args[5])
        key = self._write_key(func, args, kwargs or {})
        if key is None:
            return super().dispatch(func, types, args, kwargs)
        if key in self._accepted:
            return args[0]
        result = super().dispatch(func, types, args, kwargs)
        if result is args[0] and self._write_key(func, args, kwargs or {}) == key:
            self._accepted.add(key)
        return result

    def _as_fake(self, value: Any) -> Any:
        return self.fake_tensor_converter.from_real_tensor(self, value) if type(value) in _REAL else value

    def _write_key(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable | None:
        """What a write to the first argument depends on; None for other operations, and if numbers are known."""
        if not args or type(args[0]) is not FakeTensor or not _gives_first_argument_back(func):
            return None
        key: list[Hashable] = [func, *kwargs]
        memories = set()
        for value in (*args, *kwargs.values()):
            if type(value) is FakeTensor and value.fake_mode is self and value.constant is None:
                key.append((value.shape, value.stride(), value.dtype, value.fake_device))
                memory = value.untyped_storage()._cdata
                if memory in memories:  # PyTorch refuses some overlaps
                    return None
                memories.add(memory)
            elif type(value) in (int, float, bool, str, type(None)):
                key.append((type(value), value))
            else:
                return None
        return tuple(key)

    def _batch_norm(self, x: FakeTensor, training: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = x.shape[1] if training or x.fake_device.type != "cpu" else 0
        form = x.dtype, x.fake_device
        return (
            self.fake(x.shape, x.stride(), *form),
            self.fake((count,), (1,), *form),
            self.fake((count,), (1,), *form),
        )

    def fake(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():  # not an operation of the trace
            return FakeTensor(self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


_REAL = {torch.Tensor, torch.nn.Parameter}


@functools.cache
def _gives_first_argument_back(func: Any) -> bool:
    """Whether an operation writes to its first argument alone, keeps its form, and returns it."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable or len(schema.returns) != 1 or torch.Tag.inplace_view in func.tags:
        return False
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    returned = schema.returns[0].alias_info
    return written[0] and not any(written[1:]) and returned is not None and returned.is_write


def _is_simple_norm(args: Sequence[Any]) -> bool:
    """Whether the results of batch normalisation have the form of its input: contiguous, all of one type."""
    x, *parameters = args[:5]
    if type(x) is not FakeTensor or x.dim() < 2 or not x.numel():
        return False
    # is_contiguous() ignores the strides of dimensions of size 1, which may differ in the results.
    if any(stride != math.prod(x.shape[number + 1 :]) for number, stride in enumerate(x.stride())):
        return False
    if x.dtype not in (torch.float32, torch.float64) or (not args[5] and None in parameters[2:]):
        return False
    if args[5] and x.numel() == x.shape[1]:  # the variance of a single number
        return False
    form = (x.dtype, x.fake_device, x.shape[1:2])
    return all(
        value is None or (type(value) is FakeTensor and (value.dtype, value.fake_device, value.shape) == form)
        for value in parameters
    )


def _kinds(values: Sequence[Any]) -> set[type]:
    """The types of an operation's arguments, those in lists too."""
    return {type(value) for value in values}.union(*(_kinds(value) for value in values if type(value) in (list, tuple)))


@contextmanager
def lazy_graph_modules() -> Iterator[None]:
    """make_fx generates the code of its graph modules only when it is needed: that takes half a second."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        yield


@contextmanager
def quick_constants(mode: Any) -> Iterator[None]:
    """Make make_fx describe each use of a real tensor by a fake tensor that is created directly.

    By default it finds the fake mode, enters it and goes through it every time: a tenth of a trace.
    """
    from torch.fx.experimental import proxy_tensor

    thread, describing = threading.get_ident(), proxy_tensor.extract_val

    def extract_val(value: Any, *more: Any, **named: Any) -> Any:
        if type(value) in _REAL and value.layout is torch.strided and threading.get_ident() == thread:
            return mode.fake(value.shape, value.stride(), value.dtype, value.device)
        return describing(value, *more, **named)

    if type(mode) is not RememberingFakeMode or not _quick.acquire(
        blocking=False
    ):  # a second trace at the same time is slower
        yield
        return
    try:
        with replaced((proxy_tensor, "extract_val", extract_val)):
            yield
    finally:
        _quick.release()


def graph_module(root: Any, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph that generates its code when it is first called."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def tensor_form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the results of operations on a tensor have their forms from; conjugation and negation may be lazy."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()
