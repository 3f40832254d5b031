"""What a step minimises: from a model and a batch to a loss, and to the number of right answers where there is one."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from manyhands import tree
from manyhands.errors import BadBatch
from manyhands.training.torch.book import Module
from manyhands.training.torch.sources import Batch, rows

_OF_CLASSES = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)
IGNORED = -100  # the label that these losses leave out, where nothing else is said


class Objective(Protocol):
    def __call__(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss as a mean over the samples of the batch, and how many were answered rightly."""


@dataclass
class Supervised:
    """A loss of the model's answer and the last part of the batch: ``loss(model(*inputs), target)``."""

    loss: Callable[[Any, Any], torch.Tensor]

    def __call__(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs, target = inputs_and_target(batch)
        answer = model(*inputs)
        value = in_full(self.loss, answer, target)
        return mean_loss(self.loss, value, target), right_answers(answer, target)


@dataclass
class Weighed(Supervised):
    """A mean over classes in which labels weigh differently: class weights, or labels that are left out.

    Such a mean divides by what the labels of the batch weigh. In parts of a batch that is not what it is in the whole,
    so a part gives its sum and its weight, and the sums are divided by all weights together: with labels that weigh
    1 + 1 on one device and 1 + 3 on the other, by 6 on both, not by 2 on one and by 4 on the other.
    """

    def in_parts(self, model: torch.nn.Module, part: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The sum of the losses of a part of a batch, what its labels weigh, and how many were answered rightly."""
        inputs, target = inputs_and_target(part)
        answer = model(*inputs)
        function, options = parts_of_mean(self.loss)
        total = in_full(functools.partial(function, **{**options, "reduction": "sum"}), answer, target)
        return total, _weight(answer, target, options), right_answers(answer, target)


def parts_of_mean(loss: Any) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
    """The function that a mean over classes calls, and with what; PyTorch's own ones only."""
    if type(loss) is torch.nn.CrossEntropyLoss:
        names = ("weight", "ignore_index", "reduction", "label_smoothing")
        return torch.nn.functional.cross_entropy, {name: getattr(loss, name) for name in names}
    if type(loss) is torch.nn.NLLLoss:
        return torch.nn.functional.nll_loss, {n: getattr(loss, n) for n in ("weight", "ignore_index", "reduction")}
    if isinstance(loss, functools.partial) and not loss.args:
        return loss.func, loss.keywords
    return loss, {}


def is_mean_of_classes(loss: Any) -> bool:
    function, options = parts_of_mean(loss)
    named = options.keys() <= {"weight", "ignore_index", "reduction", "label_smoothing"}
    return function in _OF_CLASSES and named and options.get("reduction", "mean") == "mean"


def _weight(answer: torch.Tensor, target: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """What PyTorch divides by: the weights of all labels that count; for probabilities, their number."""
    if target.is_floating_point():
        number = answer.numel() // answer.shape[1 if answer.dim() > 1 else 0]
        return torch.full((), number, dtype=torch.float64, device=answer.device)
    counts: torch.Tensor = target != options.get("ignore_index", IGNORED)
    if (weight := options.get("weight")) is None:
        return counts.sum(dtype=torch.float64)
    of_labels: torch.Tensor = weight.to(target.device)[torch.where(counts, target, 0)]
    return torch.where(counts, of_labels, 0).sum(dtype=torch.float64)


@dataclass
class OwnStep:
    """A model that says itself what a step is: ``training_step(batch)`` gives the mean loss."""

    def __call__(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        own: Any = model
        if isinstance(model, Module) and type(model).training_step is Module.training_step:
            inputs, target = inputs_and_target(batch)  # the same step, but with the answers at hand
            answer = own(*inputs)
            return in_full(own.loss, answer, target), right_answers(answer, target)
        step = own.training_step if model.training else getattr(own, "validation_step", own.training_step)
        return step(batch), None


def placed(objective: Objective, device: torch.device, dtype: torch.dtype | None) -> Objective:
    """The same objective with the tensors of its loss, class weights say, where the model is.

    ``dtype``: that of the model, where the trainer has changed it. The caller's own loss stays as it is.
    """
    if not isinstance(objective, Supervised):
        return objective

    def moved(tensor: Any) -> Any:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    loss: Any = objective.loss
    if isinstance(loss, torch.nn.Module):
        if all(moved(tensor) is tensor for tensor in [*loss.parameters(), *loss.buffers()]):
            return objective
        loss = copy.deepcopy(loss).to(device, dtype)
    elif isinstance(loss, functools.partial):
        keywords = {n: moved(one) if isinstance(one, torch.Tensor) else one for n, one in loss.keywords.items()}
        loss = functools.partial(loss.func, *loss.args, **keywords)
    return dataclasses.replace(objective, loss=loss)


def inputs_and_target(batch: Batch) -> tuple[Sequence[Any], Any]:
    """The last part of a batch is the target, all others are the model's inputs."""
    if isinstance(batch, Mapping):
        raise BadBatch("a dict batch needs a training_step: give the model one, training_step(batch) -> loss")
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise BadBatch(
            f"the loader gave a {type(batch).__name__} where a batch (inputs, target) is needed: give both, or a model "
            "with a training_step(batch) of its own"
        )
    return batch[:-1], batch[-1]


def in_full(loss: Callable[[Any, Any], torch.Tensor], answer: Any, target: Any) -> torch.Tensor:
    """The loss in full precision: autocast is for the model (some losses refuse it, all lose by it)."""
    leaves = [answer] if isinstance(answer, torch.Tensor) else tree.flatten(answer)[0]
    kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")
    if not torch.is_autocast_enabled(kind):
        return loss(answer, target)
    with torch.autocast(kind, enabled=False):
        return loss(_widened(answer) if isinstance(answer, torch.Tensor) else tree.map_leaves(_widened, answer), target)


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16) else leaf


def mean_loss(loss: Any, value: torch.Tensor, target: Any) -> torch.Tensor:
    """The mean over samples, whatever reduction the loss has."""
    if value.dim():
        return value.flatten(1).sum(1).mean() if value.dim() > 1 else value.mean()
    if getattr(loss, "reduction", "mean") == "sum":
        return value / max(1, len(target) if isinstance(target, torch.Tensor) else rows(target))
    return value


def right_answers(answer: Any, target: Any) -> torch.Tensor | None:
    """How many rows of class scores have their largest at the target; None where that has no meaning."""
    if not (isinstance(answer, torch.Tensor) and isinstance(target, torch.Tensor)):
        return None
    if answer.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return None
    return (answer.detach().argmax(1) == target).sum()


def objective_for(model: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None) -> Objective:
    if loss is None and hasattr(model, "training_step"):
        return OwnStep()
    return Supervised(loss or torch.nn.functional.cross_entropy)
