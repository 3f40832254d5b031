"""Two operations that replace PyTorch's convolution and its backward, and compute each in its chosen way.

They take the arguments of ``aten.convolution`` and ``aten.convolution_backward``. So a pass over a trace only replaces
the targets, and a dispatch mode (:class:`ChosenConvolutions`) does the same to operations as they are called.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from manyhands.backends.torch.compat import TorchDispatchMode
from manyhands.backends.torch.convolutions.choice import Report, choose, way_of
from manyhands.backends.torch.convolutions.problems import HALVES, Kind, Problem, is_aligned, problem
from manyhands.backends.torch.kernels import batch_norm
from manyhands.errors import CannotCompile

_aten = torch.ops.aten
_library = torch.library.Library("manyhands", "FRAGMENT")
_HOW = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups"
_TAGS = (torch.Tag.needs_exact_strides,)  # for Inductor: ways are chosen for these strides
_library.define(f"convolution(Tensor x, Tensor weight, Tensor? bias, {_HOW}) -> Tensor", tags=_TAGS)
_library.define(
    "convolution_backward(Tensor gradient, Tensor x, Tensor weight, SymInt[]? bias_sizes, "
    f"{_HOW}, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
convolution = torch.ops.manyhands.convolution.default
convolution_backward = torch.ops.manyhands.convolution_backward.default
REPLACEMENTS: dict[object, Any] = {
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
}
for _original, _replacement in REPLACEMENTS.items():  # estimates give them the cost of PyTorch's
    flop_registry[_replacement.overloadpacket] = flop_registry[_original.overloadpacket]  # type: ignore[attr-defined]


def problems_of(target: object, args: tuple[Any, ...]) -> list[Problem]:
    """The problems of a call of PyTorch's convolution or its backward."""
    problems: tuple[Problem | None, ...] = ()
    if target is _aten.convolution.default:
        x, weight, bias, *how = args
        problems = (_forward_problem(x, weight, bias, how),)
    elif target is _aten.convolution_backward.default:
        gradient, x, weight, _, *how, mask = args
        problems = _backward_problems(gradient, x, weight, how, mask)
    return [problem for problem in problems if problem is not None]


def _forward_problem(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Sequence[Any]
) -> Problem | None:
    """``how``: the arguments of PyTorch's operation after the bias."""
    stride, padding, dilation, transposed, _, groups = how
    if transposed:
        return None
    return problem(Kind.FORWARD, x, weight, (), stride, padding, dilation, groups, bias is not None)


def _backward_problems(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, how: Sequence[Any], mask: Sequence[bool]
) -> tuple[Problem | None, Problem | None]:
    stride, padding, dilation, transposed, _, groups = how
    if transposed:
        return None, None
    geometry = stride, padding, dilation, groups
    return (
        problem(Kind.INPUT_GRADIENT, gradient, weight, x.shape, *geometry) if mask[0] else None,
        problem(Kind.WEIGHT_GRADIENT, gradient, x, weight.shape, *geometry) if mask[1] else None,
    )


def _convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any) -> torch.Tensor:
    way = way_of(_forward_problem(x, weight, bias, how))
    if way is None or not is_aligned(x, weight):
        result: torch.Tensor = _aten.convolution.default(x, weight, bias, *how)
        return result
    return way(x, weight, bias)


def _convolution_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *how: Any
) -> tuple[Any, Any, Any]:
    *settings, mask = how
    for_input, for_weight = map(way_of, _backward_problems(gradient, x, weight, settings, mask))
    for_input = for_input if is_aligned(gradient, weight) else None
    for_weight = for_weight if is_aligned(gradient, x) else None
    sums = mask[2] and _can_sum(gradient)
    rest = [mask[0] and for_input is None, mask[1] and for_weight is None, mask[2] and not sums]
    results: list[Any] = [None, None, None]
    if any(rest):
        results = list(_aten.convolution_backward.default(gradient, x, weight, bias_sizes, *settings, rest))
    if for_input is not None:
        results[0] = for_input(gradient, weight)
    if for_weight is not None:
        results[1] = for_weight(gradient, x)
    if sums:
        results[2] = batch_norm.channel_sums(gradient)
    return results[0], results[1], results[2]


def _can_sum(gradient: torch.Tensor) -> bool:
    """Whether our kernel can compute the gradient of a bias."""
    on_gpu = gradient.device.type == "cuda" and gradient.dtype in HALVES
    return on_gpu and batch_norm.fits(gradient) and _has_kernels(gradient.device, gradient.dtype)


@functools.cache
def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        batch_norm.ready(device, (dtype,))
    except CannotCompile:
        return False
    return True


# Problems of the operations below are recorded here. Not thread-local: autograd has threads for backward passes.
_recorded: Counter[Problem] | None = None


def _recording(target: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if _recorded is not None:
            _recorded.update(problems_of(target, args))
        return compute(*args)

    return call


for _original, _compute in (
    (_aten.convolution.default, _convolution),
    (_aten.convolution_backward.default, _convolution_backward),
):
    _library.impl(REPLACEMENTS[_original], _recording(_original, _compute), "CompositeExplicitAutograd")
# For fake and meta tensors, as in a trace, they are PyTorch's operations.
torch.library.register_fake("manyhands::convolution", _aten.convolution.default, lib=_library)
torch.library.register_fake("manyhands::convolution_backward", _aten.convolution_backward.default, lib=_library)


def may_choose() -> bool:
    """Whether results may depend on timing: not if runs must be deterministic, or without cuDNN."""
    settings = torch.backends.cudnn
    return settings.enabled and not settings.deterministic and not torch.are_deterministic_algorithms_enabled()


class ChosenConvolutions(TorchDispatchMode):
    """Computes convolutions in their chosen ways. Those of the first pass are recorded, then ways are chosen for them.

    Enter it before other modes, so that these see PyTorch's operations.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps = steps
        self.problems = Counter[Problem]()  # of the recorded passes
        self.recording = False
        self.report: Report | None = None

    def choose(self) -> None:
        """Choose ways for the recorded problems, and stop recording."""
        self.recording = False
        if self.problems:
            self.report = choose(self.problems, self._steps)

    @contextmanager
    def in_compiled_code(self) -> Iterator[None]:
        """Instead of the mode, around a compiled function whose graphs contain the operations of this module."""
        global _recorded
        before, _recorded = _recorded, self.problems if self.recording else None
        try:
            yield
        finally:
            _recorded = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in REPLACEMENTS or kwargs:
            return func(*args, **kwargs or {})
        if self.recording:
            self.problems.update(problems_of(func, args))
        return (_convolution if func is _aten.convolution.default else _convolution_backward)(*args)
