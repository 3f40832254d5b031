"""The private names of PyTorch that manyhands uses: in this folder and nowhere else in the package.

Each group says what it is for and why nothing public serves. All are there in PyTorch 2.11 to 2.13. When a new
release moves or drops one, this folder fails to import, or its test names what is missing: one place to mend. Dynamo
and Inductor have a file each; other modules get all names from here, as ``compat.name``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import guards as _guards
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.parallel import _functions as parallel_functions
from torch.nn.utils import parametrize
from torch.optim import optimizer as _of_optimizers
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.utils import _device as default_device
from torch.utils._device import DeviceContext
from torch.utils._device import _device_constructors as device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_mode_stack
from torch.utils._pytree import (
    SUPPORTED_NODES,
    register_pytree_node,
    tree_flatten,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from manyhands.addresses import AddressRange
from manyhands.backends.torch.compat.dynamo import (
    DispatchModeWithoutDynamo,
    ForwardGraph,
    aot_autograd,
    checks_custom_operations,
    compile_lock,
    compile_quietly,
    compiling,
    facts_of_step,
    forward_graph,
    is_graph_break,
    is_spent,
    make_boxed_function,
    skip_code,
    spent_loss,
    stack_of,
)
from manyhands.backends.torch.compat.inductor import custom_graph_pass, inductor_compile, prepare_inductor
from manyhands.backends.torch.compat.sequence_slot import replace_getitem

# Modes of a thread, asked before every call: the public functions take several times as long, or do not exist.
set_grad_enabled = torch._C._set_grad_enabled
count_dispatch_modes = torch._C._len_torch_dispatch_stack
count_function_modes = torch._C._len_torch_function_stack
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
no_autocast = torch._C._DisableAutocast
no_torch_functions = torch._C.DisableTorchFunction
jit_tracing_state = torch._C._get_tracing_state
functorch_level = torch._C._functorch.maybe_current_level
is_functorch_tensor = torch._C._functorch.is_functorch_wrapped_tensor
fp32_precision = torch._C._get_fp32_precision_getter
deterministic_algorithms = torch._C._get_deterministic_algorithms

# As torch.cuda.is_current_stream_capturing, without asking whether CUDA is there; the handle of a device's current
# stream, whose object takes long to make. None in a build without CUDA.
is_current_stream_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


# Whether the tensors with these numbers are at these addresses, in one call; None in a build without CUDA.
equal_addresses: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def arguments_lie_at(places: dict[int, int]) -> Callable[[Sequence[Any]], bool]:
    """A check that the arguments with these numbers are at these addresses."""
    if not places:
        return lambda arguments: True
    if equal_addresses is None:
        return lambda arguments: all(arguments[number].data_ptr() == place for number, place in places.items())
    numbers, addresses = [*places], [places.get(number, 0) for number in range(max(places) + 1)]
    return lambda arguments: bool(equal_addresses(list(arguments), addresses, numbers))


# It raises if values are not as they should be, and has no result: PyTorch 2.11 drops it from graphs as dead code.
torch.fx.node.has_side_effect(torch.ops.aten._linalg_check_errors.default)

# Operations over lists of tensors, one kernel for all: what PyTorch's own optimizers use.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_zero_ = torch._foreach_zero_
# The two operations of torch.amp.GradScaler, which makes the host wait between them.
unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_

# What PyTorch calls before it uses CUDA; virtual devices replace it.
LAZY_INIT = "_lazy_init"

# Which function of the backward pass runs: there is no public way to ask.
current_autograd_node = torch._C._current_autograd_node


# Module.to on virtual devices: swap_tensors refuses tensors with weak references.
swap_tensor_impl = torch._C._swap_tensor_impl
# Reads the arguments of Module.to.
parse_to = torch._C._nn._parse_to
# The bindings of operations to Python, without the dispatch of torch.ops.
BINDINGS = (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn)
# Allocates without the overhead of torch.empty_strided; None in a build without it.
empty_strided_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)


# Whether a profiler runs in this thread: a second one would be an error.
profiler_enabled = torch._C._autograd._profiler_enabled


def data_loader_iterator() -> Any:
    """The class of a DataLoader's iterators: ``__next__`` returns every batch."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    return _BaseDataLoaderIter


# Where a DataLoader keeps the iterator of its persistent workers.
PERSISTENT_ITERATOR = "_iterator"
# What torch.compile and DTensor make their wrappers of tensors with.
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
# The operation in which the host reads a number: ``x.item()``, and a tensor that is given for a number.
READ_OF_A_NUMBER = torch.ops.aten._local_scalar_dense.default
# A subclass whose operations need no detour through its own __torch_function__, as a Parameter's.
no_torch_function_of_its_own: Any = torch._C._disabled_torch_function_impl
# Below a subclass's own operations: its metadata can be set there.
no_torch_dispatch: Any = torch._C._DisableTorchDispatch
# The storage behind a weak reference, None where it is gone.
storage_from_weak_pointer: Any = torch.UntypedStorage._new_with_weak_ptr


@contextmanager
def lazy_graph_modules() -> Iterator[None]:
    """make_fx generates the code of its graph modules only when it is needed: that takes half a second."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        yield


def graph_module(root: Any, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of a graph that generates its code when it is first called."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph)


def tensors_in(values: object) -> list[torch.Tensor]:
    """The tensors in a value: lists, tuples and dicts of them."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def empty_as(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the same form, strides included."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def tensor_form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the results of operations on a tensor have their forms from; conjugation and negation may be lazy."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


def storage_id(storage: torch.UntypedStorage) -> int:
    """The number of a memory: no other memory has it while this one is alive.

    Not the address: an empty or fake storage has none.
    """
    return int(storage._cdata)


def memory_id(tensor: torch.Tensor) -> int:
    """The number of the memory that a tensor is in."""
    return storage_id(tensor.untyped_storage())


def span_of(value: object) -> AddressRange | None:
    """All of the memory that a tensor lies in, not only what it shows of it; None for what has none of its own."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        storage = value.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a tensor of torch.func, or a made-up one
        return None
    return AddressRange(start, start + size) if start and size else None


def reach(tensor: torch.Tensor) -> int:
    """How many numbers lie in memory from a tensor's first one to its last one, which may have gaps between them."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def arguments(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The arguments of an operation as its schema has them, each with its value in a call; none without a schema."""
    known = schema(func)
    expected = enumerate(() if known is None else known.arguments)
    return [(a, args[n] if n < len(args) else kwargs.get(a.name, a.default_value)) for n, a in expected]


def write_count(tensor: torch.Tensor) -> int:
    """How often PyTorch has written to a tensor in place; raises RuntimeError for a tensor of inference mode."""
    return tensor._version


@contextmanager
def allocating_from(pool: tuple[int, int], device: torch.device) -> Iterator[None]:
    """Inside, memory for the current stream comes from a pool that stays, whichever thread allocates it.

    ``torch.cuda.use_mem_pool`` holds for one thread, and a backward pass has another.
    """
    number = torch.cuda.current_device() if device.index is None else device.index
    torch._C._cuda_beginAllocateCurrentStreamToPool(number, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(number, pool)


def end_failed_capture(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """Stop the allocator from waiting for a capture whose end CUDA refused: it would free no memory between streams."""
    number = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # the capture has ended, or has never begun
        torch._C._cuda_endAllocateToPool(number, graph.pool())


def hooks_of_every_optimizer() -> SimpleNamespace:
    """The hooks that a program registered for the steps of all optimizers: ``before`` and ``after``.

    Only registering them is public. Hooks of manyhands are left out: they change nothing.
    """

    def of_program(hooks: dict[int, Any]) -> dict[int, Any]:
        return {n: hook for n, hook in hooks.items() if not str(hook.__module__).startswith("manyhands.")}

    return SimpleNamespace(
        before=of_program(_of_optimizers._global_optimizer_pre_hooks),
        after=of_program(_of_optimizers._global_optimizer_post_hooks),
    )


def pause(cycles: int) -> None:
    """Keep the current stream busy for this many cycles: kernels queue up behind it, and are timed together.

    Nothing public takes a device's time.
    """
    torch.cuda._sleep(cycles)


# Private attributes of public objects: operations, modules, tensors, nodes of autograd

# The dicts of a module that hold its tensors.
PARAMETERS, BUFFERS = "_parameters", "_buffers"

# The dicts that hold hooks; those of a parameter are None until the first hook.
HOOKS_OF_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
HOOKS_OF_MODULES = (*HOOKS_OF_FORWARD, "_backward_pre_hooks", "_backward_hooks")
HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# The hooks that run for every module, in the same order as HOOKS_OF_MODULES.
HOOKS_OF_EVERY_MODULE: list[dict[int, Any]] = [
    getattr(nn.modules.module, f"_global{name}") for name in HOOKS_OF_MODULES
]

_MARKS = frozenset(("_compiled_call_impl", "_is_fsdp_managed_module", "_fsdp_use_orig_params"))
_MARKS_OF_SHARDING = "__composable_api"  # how their names begin


def schema(operation: object) -> Any:
    """The schema of an operation: its arguments and results, and which of them it writes; None for other objects."""
    return getattr(operation, "_schema", None)


def autocast_like(context: Any, device_type: str) -> torch.autocast:
    """A context that casts as this one, for devices of another type."""
    return torch.autocast(device_type, context.fast_dtype, context._enabled, context._cache_enabled)


def forward_ad_level() -> int:
    """How many levels of forward-mode derivatives are open, less one."""
    return forward_ad._current_level


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, or ``torch.compile(module)`` returned this module."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def without_compile(module: nn.Module) -> nn.Module:
    """The module itself, of one that ``torch.compile(module)`` returned."""
    return getattr(module, "_orig_mod", module)


def is_mark(attribute: str) -> bool:
    """Whether compiling or sharding a module sets an attribute of this name."""
    return attribute in _MARKS or attribute.startswith(_MARKS_OF_SHARDING)


def check_input(layer: BatchNorm, x: torch.Tensor) -> None:
    """Raise the layer's error if the tensor has the wrong number of dimensions."""
    layer._check_input_dim(x)


def parametrise(module: nn.Module, names: list[str]) -> None:
    """Give a module the class that ``register_parametrization`` gives it, with a property for each of the tensors."""
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)


def inner_schedulers(scheduler: object) -> list[Any]:
    """The schedulers in a SequentialLR or ChainedScheduler; none for other schedulers."""
    return list(vars(scheduler).get("_schedulers", ()))


def base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that this one is a view of; None if it is no view."""
    return tensor._base


def hooks_of(value: torch.Tensor | torch.optim.Optimizer) -> dict[str, Any]:
    """The dicts with the hooks of a tensor's gradient, or of an optimizer's steps, by the names of their attributes."""
    names = HOOKS_OF_OPTIMIZERS if isinstance(value, torch.optim.Optimizer) else HOOKS_OF_PARAMETERS
    return {name: hooks for name in names if (hooks := getattr(value, name, None)) is not None}


def set_hooks(value: torch.Tensor | torch.optim.Optimizer, hooks: dict[str, Any]) -> None:
    """Give a tensor or an optimizer the hooks that :func:`hooks_of` returned."""
    for name, registered in hooks.items():
        setattr(value, name, registered)


def run_last(tensor: torch.Tensor, number: int) -> None:
    """Let a hook run after all others that wait for the accumulation of this gradient; ``number``: its handle's id."""
    hooks = tensor._post_accumulate_grad_hooks
    if next(reversed(hooks)) != number:
        hooks[number] = hooks.pop(number)  # PyTorch calls them in the order of their insertion


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook waits for the gradient of a tensor, or for its accumulation."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def saved_tensor(node: Any, name: str) -> Any:
    """What a node of autograd has saved for its backward pass under this name; RuntimeError if it is freed."""
    return getattr(node, f"_saved_{name}")
