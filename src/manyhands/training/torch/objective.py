"""What a step minimises: the loss of a model and a batch, and the number of correct predictions of classes."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from manyhands.backends.torch import compat
from manyhands.errors import BadBatch, BadSettings
from manyhands.training import refusals
from manyhands.training.loss.own_step import LossSum, is_default, plots_of, plotted_loss
from manyhands.training.torch.data import dict_batches
from manyhands.training.torch.data.batches import Batch, map_tensors, rows, tensors_in
from manyhands.training.torch.ranks.whole_batch import Rows
from manyhands.training.torch.step.known_means import KnownMeans, function_and_options
from manyhands.training.torch.step.logged import loss_of_pass

if TYPE_CHECKING:
    from manyhands.training.torch.preflight.checks import LabelRange


@dataclass(kw_only=True)
class Objective(abc.ABC):
    """What a step minimises.

    ``sums`` says how the parts of a batch add up, on several ranks or with ``accumulate``. True: each part has a sum
    and its count (:class:`LossSum`), and all sums are divided by all counts, once. False: the loss is a mean over
    samples. None: not known, because no batch is processed in parts.

    ``rows`` are gathered from all ranks for a loss that needs the whole batch. None: each rank's loss is of its part.
    """

    sums: bool | None = None
    rows: Rows | None = None
    batch_idx: int = 0  # the number of the batch in its epoch, for a step that takes it

    @abc.abstractmethod
    def value(
        self, model: torch.nn.Module, batch: Batch, known: TorchFunctionMode | None = None
    ) -> tuple[Any, torch.Tensor | None]:
        """The value of the user's loss for the batch, and the number of correct predictions (None: no classes)."""

    def output_and_target(self, model: torch.nn.Module, batch: Batch) -> tuple[Any, Any] | None:
        """What the loss is computed from; None where the model computes its loss itself."""
        return None

    def _gather(self, output: Any, target: Any) -> tuple[Any, Any]:
        return (output, target) if self.rows is None else self.rows.gather(output, target)

    def __call__(
        self, model: torch.nn.Module, batch: Batch, *, part: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The mean loss of the batch, and the number of correct predictions; ``part``: there are other parts."""
        value, correct = self.value(model, batch)
        if isinstance(value, LossSum):
            if part:
                raise BadSettings(_TWO_KINDS)
            whole = check_sum(value)
            value = whole.total / whole.count.to(whole.total.dtype)
        return value, correct

    def is_mean(self, model: torch.nn.Module) -> bool:
        """Whether the loss in evaluations is known to be a mean over samples, or a sum with its count.

        An unknown loss gets whole batches, of a size that does not depend on the devices. A trial would not do, because
        its answer depends on the samples.
        """
        return False

    def in_parts(self, model: torch.nn.Module, part: Batch) -> tuple[LossSum, torch.Tensor | None]:
        """The loss of a part of a batch as a sum and its count; for an objective with ``sums``."""
        loss_sum, _, correct = self.as_sum(model, part)
        if loss_sum is None:
            raise BadSettings(_TWO_KINDS)
        return loss_sum, correct

    def as_sum(self, model: torch.nn.Module, batch: Batch) -> tuple[LossSum | None, Any, torch.Tensor | None]:
        """The loss as a sum and its count, where these are known; the loss itself; and the correct predictions."""
        known = KnownMeans()
        value, correct = self.value(model, batch, known)
        loss_sum = value if isinstance(value, LossSum) else known.sum_of(value)
        return None if loss_sum is None else check_sum(loss_sum), value, correct


_TWO_KINDS = (
    "the loss was a LossSum (or one of PyTorch's means over classes) for one batch and a plain number for another: on "
    "several devices, or with accumulate, each batch must give the same kind. Return mh.LossSum(total, count) always"
)


def check_sum(loss_sum: LossSum) -> LossSum:
    """The sum with scalar tensors: the count in float64, without a gradient."""
    total, count = loss_sum.total, loss_sum.count
    if not isinstance(total, torch.Tensor) or total.dim():
        shape = f" and shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else ""
        kind = f"of type {type(total).__name__}{shape}"
        raise BadSettings(f"the total of a LossSum is {kind}: give a tensor with one number")
    if isinstance(count, torch.Tensor):
        if count.numel() != 1:
            raise BadSettings(f"the count of a LossSum has the shape {tuple(count.shape)}: give one number, as .sum()")
        return LossSum(total, count.detach().to(total.device, torch.float64).reshape(()))
    return LossSum(total, torch.full((), float(count), dtype=torch.float64, device=total.device))


@dataclass
class Supervised(Objective):
    """A loss of the model's output and the last part of the batch: ``loss(model(*inputs), target)``.

    Where a batch is a dict, the model gets it by name (:mod:`.data.dict_batches`): ``loss(model(**batch), batch)``, or
    without a loss of the user's the one in the model's output.
    """

    loss: Callable[[Any, Any], Any]
    is_default: bool = False  # the user has not chosen this loss
    # Learns the number of classes from the first output, before the loss sees a label that has none.
    labels: LabelRange | None = None

    def is_mean(self, model: torch.nn.Module) -> bool:
        """For batches that are not dicts; with dicts the default loss is the one in the model's output."""
        return self.rows is None and is_torchs_mean(self.loss)

    def output_and_target(self, model: torch.nn.Module, batch: Batch) -> tuple[Any, Any] | None:
        if not isinstance(batch, Mapping):
            inputs, target = inputs_and_target(batch)
            return model(*inputs), target
        return None if self.is_default else (dict_batches.output_of(model, batch), batch)

    def value(
        self, model: torch.nn.Module, batch: Batch, known: TorchFunctionMode | None = None
    ) -> tuple[Any, torch.Tensor | None]:
        both = self.output_and_target(model, batch)
        if both is None:
            with known or nullcontext():
                output = dict_batches.output_of(model, batch)
            target, value = batch, dict_batches.loss_of(output, model, batch)
        else:
            output, target = self._gather(*both)
            if not isinstance(batch, Mapping):
                if self.labels is not None and self.labels.classes.classes is None:
                    self.labels.learn(output)
                _check_shapes(self.loss, output, target)
            with known or nullcontext():
                value = in_full(self.loss, output, target)
            output, own = both
        if not isinstance(value, LossSum):
            value = mean_loss(self.loss, _loss_from(value, "the loss"), target)
        if isinstance(batch, Mapping):
            return value, count_correct(dict_batches.logits_of(output), batch.get("labels"))
        return value, count_correct(output, own)


@dataclass
class OwnStep(Objective):
    """A model that says itself what a step is: ``training_step(batch)`` gives the mean loss, or a ``LossSum``.

    ``training_step(batch, batch_idx)`` also gets the number of the batch in its epoch.
    """

    # Whether to call training_step or validation_step; None: by the model's mode.
    training: bool | None = None

    def is_mean(self, model: torch.nn.Module) -> bool:
        return self.rows is None and is_default(model, "validation_step") and is_default(model, "loss")

    def value(
        self, model: torch.nn.Module, batch: Batch, known: TorchFunctionMode | None = None
    ) -> tuple[Any, torch.Tensor | None]:
        user: Any = model
        trains = (model.training if self.training is None else self.training) or not hasattr(model, "validation_step")
        name = "training_step" if trains else "validation_step"
        if trains and makes_updates(model):
            raise BadSettings(
                f"training_step(batch, optimizers) of {type(model).__name__} makes updates and has no loss to show: "
                "give the model a validation_step(self, batch) that returns one"
            )
        if is_default(model, name):  # the same step, but with the outputs at hand
            inputs, target = inputs_and_target(batch)
            output = user(*inputs)
            with known or nullcontext():
                return in_full(user.loss, *self._gather(output, target)), count_correct(output, target)
        correct = None
        with known or nullcontext():
            returned = self._call(getattr(user, name), batch)
            if not trains and (plots := plots_of(model)) is not None:
                plotted = plots.take()
                if (share := plotted.get("acc")) is not None:
                    correct = (torch.as_tensor(share).detach() * rows(batch)).round()
                returned = plotted_loss(returned, plotted, lambda: self._call(user.training_step, batch))
        if returned is None and not trains:
            returned = loss_of_pass()
        value = (
            returned["loss"] if isinstance(returned, Mapping) and "loss" in returned else returned
        )  # as Lightning has it
        who = f"{name} of {type(model).__name__}"
        if isinstance(value, torch.Tensor) and value.dim():
            shape = tuple(value.shape)
            raise BadSettings(f"{who} returned a tensor of shape {shape}: return one number, as loss.mean()")
        return value if isinstance(value, LossSum) else _loss_from(value, who), correct

    def output_and_target(self, model: torch.nn.Module, batch: Batch) -> tuple[Any, Any] | None:
        if not is_default(model, "training_step"):
            return None
        inputs, target = inputs_and_target(batch)
        return model(*inputs), target

    def _call(self, step: Callable[..., Any], batch: Batch) -> Any:
        return step(batch, self.batch_idx) if takes_number(step) else step(batch)


def takes_number(step: Callable[..., Any]) -> bool:
    """Whether a step takes the number of the batch as its second argument."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(step).parameters
    needed = [each for each in parameters.values() if each.kind in positional and each.default is each.empty]
    return "batch_idx" in parameters or len(needed) >= 2


SEVERAL = (
    "training_step(self, batch, optimizers) calls optimizers[name].minimize(loss) for each of them, name being its "
    "key in the dict (or its number in the list) that configure_optimizers returns"
)


def makes_updates(model: torch.nn.Module) -> bool:
    """Whether the model makes its updates itself, in ``training_step(batch, optimizers)``."""
    step = getattr(model, "training_step", None)
    return callable(step) and "optimizers" in inspect.signature(step).parameters


def _loss_from(value: Any, who: str) -> torch.Tensor:
    """The value, if it is a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        raise BadSettings(f"{who} returned {refusals.in_words(value)}: return the loss, or a dict with it as 'loss'")
    raise refusals.not_a_loss(who, value)


_OF_PAIRS: tuple[Any, ...] = (torch.nn.MSELoss, torch.nn.L1Loss, torch.nn.SmoothL1Loss, torch.nn.HuberLoss)
_OF_PAIRS += tuple(
    getattr(torch.nn.functional, name) for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
)
_OF_PAIRS += (torch.nn.BCELoss, torch.nn.BCEWithLogitsLoss)
_OF_PAIRS += (torch.nn.functional.binary_cross_entropy, torch.nn.functional.binary_cross_entropy_with_logits)


def _check_shapes(loss: Any, output: Any, target: Any) -> None:
    """Refuse shapes such as (n, 1) and (n,), which PyTorch would broadcast to n * n pairs."""
    kind = loss if inspect.isfunction(loss) else type(loss)
    if kind not in _OF_PAIRS:
        return
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)) or output.shape == target.shape:
        return
    raise refusals.unlike_target(output.shape, target.shape, may_be_classes=not target.is_floating_point())


def place(objective: Objective, device: torch.device, dtype: torch.dtype | None) -> Objective:
    """The objective with the tensors of its loss, class weights say, on the model's device.

    ``dtype``: that of the model, where the trainer has changed it. The caller's own loss stays as it is.
    """
    if not isinstance(objective, Supervised):
        return objective

    def move(tensor: Any) -> Any:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    loss: Any = objective.loss
    if isinstance(loss, torch.nn.Module):
        if all(move(tensor) is tensor for tensor in [*loss.parameters(), *loss.buffers()]):
            return objective
        loss = copy.deepcopy(loss).to(device, dtype)
    elif isinstance(loss, functools.partial):
        keywords = {n: move(value) if isinstance(value, torch.Tensor) else value for n, value in loss.keywords.items()}
        loss = functools.partial(loss.func, *loss.args, **keywords)
    return dataclasses.replace(objective, loss=loss)


def inputs_and_target(batch: Batch) -> tuple[Sequence[Any], Any]:
    """The last part of a batch is the target, all others are the model's inputs."""
    if isinstance(batch, Mapping):
        raise BadBatch(
            f"a batch is a dict with {', '.join(map(repr, batch))}, and the book's Module takes (inputs, target): "
            "write its training_step(batch), which returns the loss"
        )
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise refusals.no_target(batch)
    return batch[:-1], batch[-1]


def in_full(loss: Callable[[Any, Any], Any], output: Any, target: Any) -> Any:
    """The loss in full precision: autocast is for the model (some losses refuse it, all lose by it)."""
    tensors = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
    kind = next((tensor.device.type for tensor in tensors), "cpu")
    if not torch.is_autocast_enabled(kind):
        return loss(output, target)
    with torch.autocast(kind, enabled=False):
        return loss(widen(output) if isinstance(output, torch.Tensor) else map_tensors(widen, output), target)


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision as float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def is_torchs_mean(loss: Any) -> bool:
    """Whether the loss is one of PyTorch's own, with a reduction that :func:`mean_loss` knows."""
    function, options = function_and_options(loss)
    if inspect.isfunction(function):
        return function.__module__ == torch.nn.functional.__name__ and options.get("reduction", "mean") != "sum"
    return type(function).__module__ == torch.nn.modules.loss.__name__


def mixes_samples(model: torch.nn.Module) -> bool:
    """Whether a layer uses the statistics of the batch in evaluation, too: every batch has other outputs then."""
    return any(isinstance(layer, compat.BatchNorm) and layer.running_mean is None for layer in model.modules())


def mean_loss(loss: Any, value: torch.Tensor, target: Any) -> torch.Tensor:
    """The mean over samples, whatever reduction the loss has."""
    if value.dim():
        return value.flatten(1).sum(1).mean() if value.dim() > 1 else value.mean()
    if getattr(loss, "reduction", "mean") == "sum":
        return value / max(1, len(target) if isinstance(target, torch.Tensor) else rows(target))
    return value


def count_correct(output: Any, target: Any) -> torch.Tensor | None:
    """How many rows of class scores are largest at the target; None if these are not class scores."""
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return None
    if output.dim() != 2 or target.shape != output.shape[:1] or target.is_floating_point():
        return None
    return (output.detach().argmax(1) == target).sum()


def objective_for(model: torch.nn.Module, loss: Callable[[Any, Any], Any] | None) -> Objective:
    if loss is None and hasattr(model, "training_step"):
        return OwnStep()
    return Supervised(loss or torch.nn.functional.cross_entropy, is_default=loss is None)
