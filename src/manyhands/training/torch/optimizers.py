"""Makes the optimizer of a job; :mod:`manyhands.training.optimizers` says whose learning rate counts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from manyhands.errors import BadSettings
from manyhands.training.optimizers import Optimizers

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]

# One takes sparse gradients only, the other a function that computes the loss again.
_NOT_NAMED = (torch.optim.SparseAdam, torch.optim.LBFGS)


def _by_name() -> dict[str, type]:
    base = torch.optim.Optimizer
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    return {kind.__name__.lower(): kind for kind in kinds if issubclass(kind, base) and kind not in (base, *_NOT_NAMED)}


OPTIMIZERS = Optimizers(
    where="torch.optim",
    example="torch.optim.AdamW",
    finished=(torch.optim.Optimizer,),
    by_name=_by_name,
    sgd=torch.optim.SGD,
    rate="lr",
    of_parameters=True,
)


def optimizer_for(model: Any, optimizer: Any, lr: float | None) -> torch.optim.Optimizer | MakeOptimizer:
    """The user's optimizer, or a function from a model to one (a job makes it in its worker process)."""
    if isinstance(optimizer, torch.optim.Optimizer):
        of_model = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in of_model for group in optimizer.param_groups for parameter in group["params"]):
            raise BadSettings("the optimizer has parameters of another model: make it with model.parameters()")
        return optimizer
    if optimizer is None and OPTIMIZERS.configured_by(model, lr):
        return _configured
    return functools.partial(_of_parameters, *OPTIMIZERS.maker(model, optimizer, lr))


def _of_parameters(
    make: Callable[..., torch.optim.Optimizer], rate: dict[str, float], model: torch.nn.Module
) -> torch.optim.Optimizer:
    """``make`` is a class, or a function of the parameters, as ``lambda p: torch.optim.AdamW(p, lr=1e-3)``."""
    return make(model.parameters(), **rate)


def _configured(model: Any) -> torch.optim.Optimizer:
    return model.configure_optimizers()  # type: ignore[no-any-return]
