"""Which steps a CUDA graph can capture, and how to prepare an optimizer for capture."""

from __future__ import annotations

import torch

from manyhands.backends.torch import compat
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.state import job_state
from manyhands.training.torch.step.several_optimizers import Several


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device, *, changing_rate: bool) -> None:
    """Prepare an optimizer for capture: values that change from step to step become tensors on the device."""
    for group in optimizer.param_groups:
        if _is_sgd(optimizer):
            group["fused"], group["foreach"] = True, False
        if changing_rate and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], device=device)
    count_on_device(optimizer)


def count_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer count its steps on the device, if it can; existing state moves there, too."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    job_state.settle(optimizer)


def why_not(
    data: object, optimizer: torch.optim.Optimizer, device: torch.device, world: int, accumulate: int
) -> str | None:
    """The reason why a step cannot be captured in one graph; None if it can."""
    if device.type != "cuda":
        return "no CUDA graph on a CPU"
    if world > 1:
        return "several ranks: gradients cross processes during the step"
    if accumulate > 1:
        return "gradient accumulation"
    if not isinstance(data, Arrays) or data.tensors[0].device != device:
        return "the data are not on the GPU: they come from a loader or do not fit"
    if isinstance(optimizer, Several):
        return "several optimizers, each with its own step"
    if not ("capturable" in optimizer.defaults or _is_sgd(optimizer)):
        return f"{type(optimizer).__name__} reads its state on the host in every step (it is not capturable)"
    return None


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the caller has compiled the model or a part of it: then other code runs than its modules'."""
    return any(map(compat.is_compiled, model.modules()))


def _is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is torch.optim.SGD
