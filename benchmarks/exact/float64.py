"""Runs a trace in float64: what its results would be if (nearly) nothing were rounded on the way.

Plain execution rounds, and compiled code rounds in other places. Only a third run shows which of the two is nearer to
the exact result (:mod:`exact.exactness`). A trace consists of operations on tensors with explicit dtypes,
so it can run with wider ones: arguments are widened, and every floating dtype that an operation names is replaced by
the wide one:

    as traced, under autocast                                 in float64
    a = _to_copy(x, dtype=bfloat16)                           a = _to_copy(x, dtype=float64)
    b = mm(a, w)                     7 bits behind the point  b = mm(a, w)                             52 bits
    c = _log_softmax(_to_copy(b, dtype=float32), 1, False)    c = _log_softmax(_to_copy(b, dtype=float64), 1, False)
    total.add_(c.sum())                                       the same, to a copy of ``total``

The caller's tensors are not touched: writes go to copies. Integers stay unchanged. Copies of tensors that share memory
share memory, too. Every result gets the strides recorded in the trace, whatever strides the float64 kernel returns, so
that views of it are right. :class:`CannotBeExact` says why a trace cannot be run like this: it draws random numbers
(others would be drawn), works on the bits of a number, or has an operation without a float64 kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Interpreter, Node

from exact.exactness import CannotBeExact, Distance, Verdict, judge
from exact.float64_attention import attention, is_attention
from manyhands.addresses import join
from manyhands.backends.torch import compat
from manyhands.backends.torch.capture.trace import HIDDEN_VIEWS, Trace
from manyhands.backends.torch.compat import reach, span_of, tree_leaves, tree_map

_aten = torch.ops.aten
_WIDE = {True: torch.complex128, False: torch.float64}  # by whether the dtype is complex
_FEW = 16  # results with fewer numbers than this may be right by luck
_TF32 = 2.0**-10
_LUCK = {True: 5e-2, False: 5e-3}  # by whether the computation is in low precision
_JUMP = 2.5e-3  # in ResNet-18 with a batch of 16, one flipped ReLU changes the gradients before it by 1.4e-3
_LEAPING = {
    "threshold_backward", "hardtanh_backward", "leaky_relu_backward", "elu_backward", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d", "max", "min", "gt", "lt", "ge", "le", "eq",
    "ne", "argmax", "argmin", "argsort", "sort", "topk", "kthvalue", "median", "sign", "sgn", "round", "floor", "ceil",
    "trunc", "fmod", "remainder", "bucketize", "searchsorted",
}  # fmt: skip
# Operations that read or return other dtypes than those of their arguments, which their schema does not show.
_BY_BITS = (
    "view.dtype", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_", "_scaled_mm", "quantize", "fake_quant",
    "frexp", "nextafter",
)  # fmt: skip
_SOFTMAX = (_aten._softmax.default, _aten._log_softmax.default)


def exact(trace: Trace, tensors: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> list[Any]:
    """The results of a trace in float64, its gradients, and what it writes to the caller's ``written`` tensors.

    ``trace`` has no compiled regions.
    """
    for step in trace.steps:
        _must_be_plain(step.task.token, step.node)
    if coarsest(trace) < 1e-8:
        raise CannotBeExact("it computes in float64 already")
    try:
        with torch.no_grad(), compat.no_autocast():
            run = _Float64Interpreter(trace, tensors)
            results = run.run(*tensors)
            return [*results, *(run.of[id(tensor)] for tensor in written)]
    except CannotBeExact:
        raise
    except Exception as error:  # no kernel, no memory
        text = str(error).strip().splitlines()
        raise CannotBeExact(f"{type(error).__name__}: {text[0] if text else 'no reason given'}") from None


def _must_be_plain(token: str | None, node: Node) -> None:
    name = str(node.target).removeprefix("aten.")
    if token is not None:
        raise CannotBeExact(f"{name} draws random numbers: other dtypes would draw different ones")
    if name.startswith(_BY_BITS):
        raise CannotBeExact(f"{name} depends on how numbers are stored")


class _Float64Interpreter(Interpreter):
    """Runs a graph with float64 in place of every floating dtype."""

    def __init__(self, trace: Trace, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(trace.module)
        callers = [*tensors, *trace.constant_values()]
        whole = any(str(node.target).startswith("aten.as_strided") for node in trace.module.graph.nodes)
        self.of = _widened({id(tensor): tensor for tensor in callers}, whole)
        self._node: Node | None = None

    def run_node(self, n: Node) -> Any:
        self._node = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._copy(super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._copy(super().get_attr(target, args, kwargs))

    def _copy(self, value: Any) -> Any:
        return self.of[id(value)] if isinstance(value, torch.Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        node = self._node
        assert node is not None
        schema = compat.schema(target)
        if schema is None:  # one of several results
            return super().call_function(target, args, kwargs)
        args, kwargs = tree_map(_wide_type, (args, kwargs))
        if _makes_numbers(node):
            args, kwargs = tree_map(_as_number, (args, kwargs))
            if any(argument.name == "dtype" for argument in schema.arguments):
                kwargs = {"dtype": _WIDE[node.meta["val"].is_complex()], **kwargs}
        if target in _SOFTMAX:
            args = (*args[:2], False)  # do not convert half precision to float32
        metas: Any = node.meta.get("val")
        if target is _aten.cudnn_batch_norm.default:
            # Use PyTorch's native operation, which has no reserve space for cuDNN's backward pass.
            result, metas = (*_aten.native_batch_norm.default(*args[:8]), None), (*metas[:3], None)
        elif target is _aten.cudnn_batch_norm_backward.default:
            x, gradient, *others = args[:7]
            result = _aten.native_batch_norm_backward.default(gradient, x, *others, True, args[7], [True] * 3)
        elif is_attention(target):
            result = attention(target, args, kwargs, metas)
        else:
            result = target(*args, **kwargs)
        if target in HIDDEN_VIEWS or any(returned.alias_info is not None for returned in schema.returns):
            return result
        if isinstance(result, (list, tuple)):
            parts = [_in_form(returned, meta) for returned, meta in zip(result, metas, strict=True)]
            return parts if isinstance(result, list) else tuple(parts)
        return _in_form(result, metas)


def _wide_type(value: Any) -> Any:
    if isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex):
        return _WIDE[value.is_complex]
    return value


def _makes_numbers(node: Node) -> bool:
    """Whether an operation returns floating numbers for integers, or for no tensors: they would be float32."""
    inputs = [source.meta.get("val") for source in node.all_input_nodes]
    if not _is_number(node.meta.get("val")) or any(_is_number(leaf) for leaf in tree_leaves(inputs)):
        return False
    return not inputs or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _as_number(value: Any) -> Any:
    """Integers as floating numbers; a mask stays a mask."""
    if isinstance(value, torch.Tensor) and not _is_number(value) and value.dtype is not torch.bool:
        return value.double()
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _in_form(result: Any, meta: Any) -> Any:
    """A fresh result, widened, with the strides recorded in the trace."""
    if not isinstance(result, torch.Tensor) or not isinstance(meta, torch.Tensor):
        return result
    if result.shape != meta.shape:
        raise CannotBeExact(f"a result is {tuple(result.shape)} in float64, and {tuple(meta.shape)} as it was traced")
    if _is_number(result):
        result = result.to(_WIDE[result.is_complex()])
    if result.numel() < 2 or result.stride() == meta.stride():
        return result
    return torch.empty_strided(meta.shape, meta.stride(), dtype=result.dtype, device=result.device).copy_(result)


def _widened(tensors: dict[int, torch.Tensor], whole: bool) -> dict[int, torch.Tensor]:
    """Wide copies by tensor id; copies of tensors that share memory share it again.

    ``whole``: copy each tensor's entire storage, because the trace addresses it by offsets.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors.values():
        groups.setdefault(compat.memory_id(tensor), []).append(tensor)
    spans = [span for group in groups.values() if (span := span_of(group[0])) is not None]
    if len(join(spans)) < len(spans):
        raise CannotBeExact("two tensors share memory, and PyTorch does not know it (from_numpy)")
    copies: dict[int, torch.Tensor] = {}
    for group in groups.values():
        first = group[0]
        if len({tensor.dtype for tensor in group}) > 1:
            raise CannotBeExact("two tensors of different dtypes share memory")
        low = 0 if whole else min(tensor.storage_offset() for tensor in group)
        high = (
            first.untyped_storage().nbytes() // first.element_size()
            if whole
            else max(tensor.storage_offset() + reach(tensor) for tensor in group)
        )
        flat = first.detach().as_strided((high - low,), (1,), low)
        base = flat.to(_WIDE[first.is_complex()] if _is_number(first) else first.dtype, copy=True)
        for tensor in group:
            copies[id(tensor)] = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - low)
    return copies


# Distances


def coarsest(trace: Trace) -> float:
    """The relative rounding error of the least precise dtype that a trace computes in."""
    values = [value for node in trace.storages for value in tree_leaves(node.meta.get("val")) if _is_number(value)]
    least = max((torch.finfo(value.dtype).eps for value in values), default=0.0)
    return max(least, _TF32) if least > 1e-8 and trace.gpus() and may_use_tf32() else least


def may_use_tf32() -> bool:
    """Whether float32 products and convolutions on GPUs may be computed with ten mantissa bits."""
    return any(compat.fp32_precision("cuda", of) == "tf32" for of in ("matmul", "conv"))


def has_jumps(trace: Trace) -> bool:
    """Whether a trace has operations that turn a rounding error into a jump: derivatives with a step, comparisons."""
    return any(step.task.name in _LEAPING for step in trace.steps)


def verdict(
    candidate: Sequence[Any],
    plain: Sequence[Any],
    exactly: Sequence[Any],
    coarse: float,
    *,
    has_jumps: bool = True,
    before: Sequence[torch.Tensor] = (),
) -> Verdict:
    """Whether results are as exact as those of plain execution; ``coarse`` is the rounding error of both computations.

    The last results are tensors that were written to; ``before`` has their values before that.
    """
    return judge(
        distances(candidate, plain, exactly, coarse, before), _LUCK[coarse > 1e-4], _JUMP if has_jumps else 0.0
    )


def distances(
    candidate: Sequence[Any],
    plain: Sequence[Any],
    exactly: Sequence[Any],
    coarse: float,
    before: Sequence[torch.Tensor] = (),
) -> list[Distance]:
    """How far two ways are from each exact result; ``coarse`` is the rounding error of their computations.

    Results that differ in shape, in dtype or in where they are NaN are infinitely far from each other.
    """
    there = [*[None] * (len(plain) - len(before)), *before]
    return [
        _distance(a, b, c, coarse, there)
        for a, b, c, there in zip(candidate, plain, exactly, there, strict=True)
        if isinstance(b, torch.Tensor) or a != b
    ]


def _distance(candidate: Any, plain: Any, exactly: Any, coarse: float, before: torch.Tensor | None) -> Distance:
    same = isinstance(candidate, torch.Tensor) and candidate.shape == plain.shape and candidate.dtype == plain.dtype
    if not same:
        return Distance(math.inf, 0.0, 1.0, 0.0)
    floor = 0.0
    if _is_number(plain):
        eps = torch.finfo(plain.dtype).eps
        floor = max(4 * eps if eps > 1e-5 else 64 * eps, 4 * coarse if plain.numel() < _FEW else 0.0)
    elif torch.equal(plain, exactly) and not torch.equal(candidate, plain):
        return Distance(math.inf, 0.0, 1.0, 0.0)
    finite = plain.isfinite()
    if not bool(finite.all()):
        if not torch.equal(candidate[~finite].nan_to_num(), plain[~finite].nan_to_num()):
            return Distance(math.inf, 0.0, 1.0, floor)
        candidate, plain, exactly = candidate[finite], plain[finite], exactly[finite]
        before = before[finite] if before is not None else None
    wide = _WIDE[exactly.is_complex()]
    a, b, c = candidate.to(wide), plain.to(wide), exactly.to(wide)
    size = float(c.norm())
    if not math.isfinite(size):
        raise CannotBeExact("exact results are infinite or NaN where plain execution's are not")
    ours_off, plain_off = float((a - c).norm()), float((b - c).norm())
    ours_off = ours_off if math.isfinite(ours_off) else math.inf
    change = float((c - before.detach().to(wide)).norm()) if before is not None else 0.0
    # Only if rounding leaves the change visible: plain execution in bfloat16 also loses a thousandth of a weight.
    if plain_off + floor * size < change / 4:
        return Distance(ours_off, plain_off, change, floor * size / change, size)
    return Distance(ours_off, plain_off, size, floor)
