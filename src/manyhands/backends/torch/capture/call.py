"""One call of a PyTorch function: its signature, and how it is traced.

Two calls share a plan if their arguments have the same structure, their tensors the same shape, strides, dtype and
device, everything else has the same value or (modules, functions, optimizers) is the same object, and PyTorch's modes
are the same. What a function reads from outside its arguments is guarded (``guards/state.py``).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from manyhands import tree
from manyhands.addresses import Same, joined
from manyhands.backends.torch import compat
from manyhands.backends.torch.addresses import span_of
from manyhands.backends.torch.capture import trace as torch_trace
from manyhands.backends.torch.capture.captured_graph import trace_captured
from manyhands.backends.torch.capture.reasons import why
from manyhands.backends.torch.capture.refusals import (
    BY_VALUE,
    refuse_changed_containers,
    refuse_changed_forms,
    refuse_changed_gradients,
    refuse_late_checks,
    refuse_shared_results,
    refuse_uncomparable_arguments,
    refuse_unknown_results,
    refuse_writes_to_shared_arguments,
)
from manyhands.backends.torch.capture.results import opened
from manyhands.backends.torch.capture.trace import Trace
from manyhands.backends.torch.capture.watch import Watch
from manyhands.backends.torch.compat import FakeTensor, FakeTensorMode
from manyhands.backends.torch.guards.state import Outside
from manyhands.backends.torch.passes.split import split
from manyhands.backends.torch.run.result_copies import has_no_gaps
from manyhands.backends.torch.virtual import VirtualTensor, home, no_hooks, only_hooks, only_known_functions
from manyhands.errors import CannotTrace, MustRunAsWritten
from manyhands.python_code.generated import function


@dataclass(frozen=True)
class Call:
    """One call's tensors, and what has to be the same for another call to be run in the same way."""

    signature: tuple[Any, ...]
    tensors: list[torch.Tensor]
    others: list[Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    # The arguments with other tensors in place of these.
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]

    @property
    def shares_memory(self) -> bool:
        """Whether two of the tensors do."""
        return bool(self.signature[2])

    @property
    def run_arguments(self) -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
        """What a run takes."""
        return self.tensors, self.arguments, self.keywords


def call(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    leaves, structure = tree.flatten((arguments, keywords))
    tensors: list[torch.Tensor] = []
    others: list[Any] = []
    known: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            known.append(_tensor_key(leaf))
        else:
            others.append(leaf)
            known.append(_key(leaf))

    def rebuild(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        replacements = iter(values)
        return structure.unflatten(next(replacements) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)  # type: ignore[return-value]

    orders = _orders((arguments, keywords))
    signature = (structure, tuple(known), _aliases(tensors), modes(), orders, tuple(_first_of_each(tensors)))
    return Call(signature, tensors, others, arguments, keywords, rebuild)


def _first_of_each(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the number of its first occurrence: code may ask whether two arguments are the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors)]


def _orders(value: Any) -> tuple[Any, ...]:
    """The order of the keys of dicts: structures compare equal without it, but a loop over a dict depends on it."""
    if isinstance(value, dict):
        inner = [_orders(part) for part in value.values()]
        return (tuple(value), *inner)
    if isinstance(value, (list, tuple)):
        return tuple(order for part in value if (order := _orders(part)))
    return ()


def _tensor_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (Same(tensor),)
    # A parameter is read in place, so one at another address is another call.
    place = tensor.data_ptr() if type(tensor) is nn.Parameter else None
    # Lazy conjugation or negation: the same memory stands for other numbers.
    signs = tensor.is_conj(), tensor.is_neg()
    gradient = tensor.requires_grad and tensor.is_leaf and tensor.grad is not None
    form = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
    return (type(tensor), *form, *signs, gradient, place)


def _key(leaf: Any) -> Any:
    if isinstance(leaf, BY_VALUE):
        return type(leaf), repr(leaf)
    return Same(leaf)


def _aliases(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether two tensors share memory, by address: two ``from_numpy`` of one array do so without sharing a storage."""
    spans = [span for tensor in tensors if (span := span_of(tensor)) is not None]
    return len({id(tensor) for tensor in tensors}) < len(tensors) or len(joined(spans)) < len(spans)


def _capturing() -> bool:
    """Whether the caller is capturing a CUDA graph right now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# PyTorch's settings that change what an operation does, or how it is best run: they are read before every call. With
# those of the second group users choose among kernels: a CUDA graph keeps the kernels that it was captured with.
_SETTINGS: dict[str, Callable[[], object]] = {
    "is_grad_enabled": torch.is_grad_enabled,
    "is_inference_mode_enabled": torch.is_inference_mode_enabled,
    "get_default_dtype": torch.get_default_dtype,
    "get_num_threads": torch.get_num_threads,
    "dispatch_modes": compat.count_dispatch_modes,
    "function_modes": compat.count_function_modes,
    "anomaly": torch.is_anomaly_enabled,
    "functorch_level": compat.functorch_level,
    "capturing": _capturing,
    # Kernels
    "deterministic": compat.deterministic_algorithms,
    "cudnn": compat.cudnn_enabled,
    "cudnn_deterministic": compat.cudnn_deterministic,
    "cudnn_benchmark": compat.cudnn_benchmark,
    "math_sdp": compat.math_sdp_enabled,
    "flash_sdp": compat.flash_sdp_enabled,
    "mem_efficient_sdp": compat.mem_efficient_sdp_enabled,
    "cudnn_sdp": compat.cudnn_sdp_enabled,
}
# The same as expressions, for generated code that recognises a call; and settings that take more than one call.
MODES = (
    *(f"{name}()" for name in _SETTINGS),
    "fp32_precision('cuda', 'matmul')",
    "fp32_precision('cuda', 'conv')",
    "any_autocast() and (is_autocast('cuda') and autocast_dtype('cuda'), is_autocast('cpu') and autocast_dtype('cpu'), "
    "remembers_casts())",
    "device.CURRENT_DEVICE",
    "forward_ad_level()",
    "jit() is None",
)
MODE_NAMES: dict[str, Any] = {
    **_SETTINGS,
    "fp32_precision": compat.fp32_precision,
    "any_autocast": compat.is_any_autocast_enabled,
    "is_autocast": torch.is_autocast_enabled,
    "autocast_dtype": torch.get_autocast_dtype,
    "remembers_casts": torch.is_autocast_cache_enabled,
    "device": compat.default_device,
    "forward_ad_level": compat.forward_ad_level,
    "jit": compat.jit_tracing_state,
}
modes = function("modes", f"def modes():\n    return {', '.join(MODES)},", dict(MODE_NAMES))


def _why_plain() -> str | None:
    """Why PyTorch must see a call as it is written, or None: somebody observes it, or differentiates it."""
    if not only_hooks():
        return "a dispatch mode is active, and it must see every operation"
    if not only_known_functions():
        return "a function mode is active, and it must see every call"
    if compat.forward_ad_level() >= 0 or compat.functorch_level() is not None:
        return "it is called inside a transform (torch.func, forward-mode derivatives)"
    if compat.jit_tracing_state() is not None:
        return "it is called while torch.jit traces"
    if torch.is_anomaly_enabled():
        return "torch.autograd.detect_anomaly() must see every derivative"
    if _capturing():
        return "it is called during the capture of a CUDA graph, which cannot contain another one"
    return None


_COMMON = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def with_varied_numbers(call: Call) -> Call:
    """The call to compare results with: an argument of equal numbers, as in a warm-up, gets random numbers instead.

    With zeros, nearly all results are equal. Random numbers lie between zero and the number itself, so that a
    probability stays one.
    """
    first = _first_of_each(call.tensors)
    tensors = [
        _random_like(tensor, seed=number) if _is_constant(tensor) else tensor
        for number, tensor in zip(first, call.tensors, strict=True)
    ]
    if all(drawn is tensor for drawn, tensor in zip(tensors, call.tensors, strict=True)):
        return call
    arguments, keywords = call.rebuild(tensors)
    return replace(call, tensors=tensors, arguments=arguments, keywords=keywords)


def _is_constant(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.dtype not in _COMMON or tensor.numel() < 2:
        return False
    numbers = tensor.detach()
    if not has_no_gaps(numbers):  # it may be a single number, expanded
        return False
    return bool((numbers == numbers.flatten()[0]).all()) and not (tensor.is_leaf and tensor.grad is not None)


def _random_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A tensor of the same form with random numbers, which leaves all generators untouched."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    numbers = torch.rand(tensor.shape, device=tensor.device, dtype=torch.float32, generator=generator)
    with torch.no_grad():
        whole = tensor.flatten()[0].float()
        numbers = numbers * torch.where(whole.isfinite() & (whole != 0), whole, 1.0)
        drawn = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        drawn.copy_(numbers)
    return drawn.requires_grad_(tensor.requires_grad)


# Tracing


def trace(function: Callable[..., Any], call: Call, *, to_compile: bool = False) -> Trace:
    """Trace the function for calls of this signature.

    ``to_compile``: trace attention layers as the small operations that they use for compilers, not as the one operation
    that plain execution uses in eval mode; the compiler gets ready meanwhile.
    """
    if (reason := _why_plain()) is not None:
        raise MustRunAsWritten(reason)
    if to_compile:
        compat.prepare_inductor(call.tensors)
    refuse_uncomparable_arguments(call.tensors, call.others)
    outside = Outside(function, call.others)
    with_gradient = any(t.requires_grad and t.is_leaf and t.grad is not None for t in call.tensors)
    watch = Watch(outside, refuse_gradients=with_gradient, to_compile=to_compile)
    captured = trace_captured(function, call.tensors, call.others)
    if captured is None:
        # In a copy of the context: what the function sets there is not left behind.
        captured = contextvars.copy_context().run(_traced, function, call, watch)
    captured = split(whole := captured)
    captured.unsplit = whole if captured is not whole else None
    if watch.seeded and any(step.task.token is not None for step in captured.steps):
        raise CannotTrace("it sets the state of a random generator that it draws from")
    refuse_late_checks(captured)
    refuse_shared_results(captured)
    if call.shares_memory:
        refuse_writes_to_shared_arguments(captured)
    constants = {id(value): value for value in captured.constant_values()}
    for tensor in constants.values():
        outside.add_address(tensor, "a tensor from outside")
    for tensor, before in watch.known():
        outside.add_gradient(tensor, before, same=id(before) in constants)
    captured.holds, captured.changed = outside.holds, lambda: getattr(outside.changed(), "name", None)
    captured.watched, captured.forms_are_guarded = lambda: outside.seen, outside.forms_are_guarded
    return captured


def _traced(function: Callable[..., Any], call: Call, watch: Watch) -> Trace:
    """What ``make_fx`` records when it runs the function with stand-ins for its tensors."""
    recorded = [tensor.requires_grad for tensor in call.tensors]
    first = _first_of_each(call.tensors)

    def flat(*stand_ins: torch.Tensor) -> Any:
        tensors = [stand_ins[number] for number in first]
        arguments = call.rebuild(tensors)
        before, forms = tree.flatten(arguments), [(tensor.shape, tensor.stride()) for tensor in tensors]
        with _same_modes():
            result = opened(function(*arguments[0], **arguments[1]))
        refuse_unknown_results(result)
        refuse_changed_gradients(tensors, recorded)
        refuse_changed_forms(tensors, forms)
        refuse_changed_containers(before, tree.flatten(arguments))
        return result

    try:
        with watch, no_hooks():
            traced = torch_trace.trace(flat, _stand_ins(call.tensors), watch)
    except Exception as error:
        watch.must_not_have_changed()  # the better reason
        if isinstance(error, CannotTrace):
            raise
        raise CannotTrace(why(error)) from error
    watch.must_not_have_changed()
    return traced


@contextmanager
def _same_modes() -> Iterator[None]:
    """Refuse a function that changes PyTorch's settings for good, which a plan would not do; put them back."""
    before = modes()
    recorded, threads, dtype = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    try:
        yield
    finally:
        if changed := modes() != before:
            torch.set_grad_enabled(recorded)
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
    if changed:
        raise CannotTrace(
            "it changes a setting of PyTorch (torch.set_grad_enabled(...), torch.set_num_threads(...)) that lasts "
            "longer than the call: set it outside, or in a 'with' block inside"
        )


def _stand_ins(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that are traced in place of the arguments; for virtual devices, fake tensors on that device."""
    mode = FakeTensorMode(allow_non_fake_inputs=True) if any(isinstance(t, VirtualTensor) for t in tensors) else None
    stand_ins: list[torch.Tensor] = []
    for tensor in tensors:
        if mode is None:
            stand_in = tensor.detach()
            if type(tensor) is nn.Parameter:  # the function may ask what it is
                stand_in = nn.Parameter(stand_in, requires_grad=False)
        elif isinstance(tensor, VirtualTensor):
            form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            stand_in = FakeTensor(mode, form, home(tensor))
        else:
            stand_in = mode.from_tensor(tensor.detach())
        stand_ins.append(stand_in.requires_grad_(tensor.requires_grad))
    return stand_ins
