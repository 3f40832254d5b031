"""PyTorch's own means over classes, recognised where a loss or a ``training_step`` calls them.

``F.cross_entropy`` and ``F.nll_loss`` divide by what the labels of the batch weigh: class weights, and 0 for labels
that are left out. Whoever processes a batch in parts needs the sum and the weight instead. Within :class:`KnownMeans`
these functions compute just that; the caller gets their quotient, which is the mean that PyTorch gives. If the caller
returns this very tensor as its loss, the sum and the weight behind it are known. For example two parts of a
batch with labels that weigh 1 + 1 and 1 + 3::

    part 1   total 2.4, count 2  -> the caller sees 1.2
    part 2   total 6.0, count 4  -> the caller sees 1.5
    the batch: (2.4 + 6.0) / (2 + 4) = 1.4, while the mean of the two means is 1.35

A part without a label that counts has the sum 0 and the weight 0, where PyTorch's mean is NaN.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from manyhands.training.loss.own_step import LossSum

IGNORED = -100  # the label that these losses leave out by default
_MEANS = (functional.cross_entropy, functional.nll_loss)
_OPTIONS = {"weight", "ignore_index", "reduction", "label_smoothing"}


class KnownMeans(TorchFunctionMode):
    """Within it, means over classes are computed as a sum and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: list[tuple[torch.Tensor, LossSum]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = _options(func, args, kwargs or {}) if func in _MEANS else None
        if options is None:
            return func(*args, **(kwargs or {}))
        scores, target = options.pop("input"), options.pop("target")
        if (weight := options["weight"]) is not None:
            options["weight"] = weight.to(scores.device, scores.dtype)
        total = func(scores, target, **{**options, "reduction": "sum"})
        count = _weight(scores, target, options)
        mean = total / count.to(total.dtype)
        self._sums.append((mean, LossSum(total, count)))
        return mean

    def sum_of(self, loss: Any) -> LossSum | None:
        """The sum and the weight behind a loss; None if it is not one of the means that were computed here."""
        return next((both for mean, both in self._sums if mean is loss), None)


def _options(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a mean by name; None for another reduction, or one in PyTorch's older notation."""
    bound = inspect.signature(func).bind(*args, **kwargs)  # not kept: a step that reaches it could not be planned
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    older = arguments.pop("size_average"), arguments.pop("reduce")
    return arguments if older == (None, None) and arguments["reduction"] == "mean" else None


def _weight(scores: torch.Tensor, target: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """PyTorch's divisor: the weights of all labels that count; for probabilities, their number."""
    if target.is_floating_point():
        number = scores.numel() // scores.shape[1 if scores.dim() > 1 else 0]
        return torch.full((), number, dtype=torch.float64, device=scores.device)
    counts: torch.Tensor = target != options["ignore_index"]
    if (weight := options["weight"]) is None:
        return counts.sum(dtype=torch.float64)
    of_labels: torch.Tensor = weight.detach().to(target.device)[torch.where(counts, target, 0)]
    return torch.where(counts, of_labels, 0).sum(dtype=torch.float64)


def function_and_options(loss: Any) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
    """The function and options of one of PyTorch's means over classes; any other loss itself, without options."""
    if type(loss) is torch.nn.CrossEntropyLoss:
        names = ("weight", "ignore_index", "reduction", "label_smoothing")
        return functional.cross_entropy, {name: getattr(loss, name) for name in names}
    if type(loss) is torch.nn.NLLLoss:
        return functional.nll_loss, {name: getattr(loss, name) for name in ("weight", "ignore_index", "reduction")}
    if isinstance(loss, functools.partial) and not loss.args:
        return loss.func, loss.keywords
    return loss, {}


def is_mean_of_classes(loss: Any) -> bool:
    """Whether the loss is one of PyTorch's means over classes, not wrapped in another function."""
    function, options = function_and_options(loss)
    return function in _MEANS and options.keys() <= _OPTIONS and options.get("reduction", "mean") == "mean"
