"""Private attributes of PyTorch's public objects: operations, modules, tensors, nodes of autograd.

What is asked of them has no public form. Guards and plans compare the dicts of a module themselves, so these have
names here, for ``vars(module)[...]``; for all else there is a function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.utils import parametrize

__all__ = ["BatchNorm", "Convolution", "Dropout"]  # the classes of all BatchNorm layers, convolutions and dropouts

# The dicts of a module that hold its tensors and the modules in it.
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"

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


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a COO tensor; the public methods refuse one that is not coalesced."""
    return tensor._indices(), tensor._values()


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


def saved(node: Any, name: str) -> Any:
    """What a node of autograd has saved for its backward pass under this name; RuntimeError if it is freed."""
    return getattr(node, f"_saved_{name}")


def function_class(node: Any) -> Any:
    """The ``torch.autograd.Function`` whose backward pass a node is; None for PyTorch's own operations."""
    return getattr(node, "_forward_cls", None)
