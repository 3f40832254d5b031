"""Refuses hooks of gradients that do something else with the parts of a batch than with the whole.

A hook of a parameter acts in every backward pass. On several devices, or in micro-batches, it sees the gradient of a
part, and the parts are added up afterwards. A mask or a factor commutes with that sum; clipping, signs, noise and
anything that is added do not. So each hook is tried once, by backward passes of known gradients on a copy of its
parameter::

    whole          h(a + b)
    two devices    h(a) + h(b)                    each has a gradient of its own
    micro-batches  a, then b, into one gradient   a hook that waits for the accumulation sees the sum so far

What a hook remembers from call to call is not seen: it should depend on the gradient alone.
"""

from __future__ import annotations

from typing import Any

import cloudpickle
import torch

from manyhands.backends.torch import compat
from manyhands.errors import BadSettings, first_line
from manyhands.training.options import Step
from manyhands.training.torch.state import randomness
from manyhands.training.torch.workers import job_bytes

_SCALES = (1e-8, 1.0, 1e4)  # of the gradients: what is added shows beside small ones, a threshold beside large ones
_INSTEAD = (
    "Masks and factors may stay. To clip, give Trainer(gradient_clip_val=...). For anything else, let the optimizer "
    "call it, which sees the gradient of the whole batch: optimizer.register_step_pre_hook(...)"
)


def check(model: torch.nn.Module, step: Step, devices: int) -> None:
    """Refuse a hook of a parameter that gives the parts of a batch another gradient than the whole."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not compat.has_gradient_hooks(parameter):
            continue
        if step.shard and devices > 1:
            raise BadSettings(
                f"Step(shard=True): the parameter {name!r} has a hook, and no device has its whole gradient. {_INSTEAD}"
            )
        with randomness.preserved(parameter.device):
            why = _why_not(parameter, devices > 1, step.accumulate > 1)
        if why is not None:
            raise BadSettings(
                f"the hook of the parameter {name!r} {why}: on several devices, or with accumulate, it acts on the "
                f"gradient of each part of a batch, before these are added up. {_INSTEAD}"
            )


def _why_not(parameter: torch.nn.Parameter, on_devices: bool, accumulates: bool) -> str | None:
    """Why a hook may not act on parts; None if it may."""
    try:
        tried: torch.nn.Parameter = cloudpickle.loads(job_bytes.dumps(parameter))
        for scale in _SCALES:
            first, second = (torch.randn_like(tried) * scale for _ in range(2))
            whole = _gradient(tried, first + second)
            if whole is None:  # an optimizer in the backward pass, which has used it
                return "leaves no gradient"
            sums = [_gradient(tried, first) + _gradient(tried, second)] if on_devices else []
            sums += [_gradient(tried, first, second)] if accumulates else []
            if not all(_are_close(whole, each) for each in sums):
                return "is not linear"
    except Exception as error:
        return f"cannot be tried ({first_line(error)})"
    return None


def _are_close(first: torch.Tensor, second: torch.Tensor) -> bool:
    rounding = min(1e-2, 1000 * torch.finfo(first.dtype).eps)
    return float((first - second).norm()) <= rounding * float(first.norm() + second.norm())


def _gradient(parameter: torch.nn.Parameter, *parts: torch.Tensor) -> Any:
    """What the hooks make of these gradients, accumulated one after the other."""
    parameter.grad = None
    for part in parts:
        parameter.view_as(parameter).backward(part.clone())  # a hook may change it in place
    return parameter.grad
