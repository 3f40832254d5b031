"""What is looked at before a job begins: a few samples through the model say more than an error of a device later."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from manyhands import tree
from manyhands.errors import BadLabels, BadSettings
from manyhands.training.torch import randomness
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import (
    IGNORED,
    OwnStep,
    Supervised,
    Weighed,
    is_mean_of_classes,
    parts_of_mean,
)
from manyhands.training.torch.sources import Arrays, Batch, Samples, Source, Stream, cut, rows

_FEW = 2  # normalisation over a batch wants more than one
_HALVES = 4  # samples that a loss is tried on, as a whole and in halves
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
_OTHERWISE_CLOSE = 3e-2


def materialise(model: torch.nn.Module, data: Source) -> None:
    """Give lazy layers their shapes, by a few samples: they must be the same on every rank."""
    if not any(torch.nn.parameter.is_lazy(tensor) for tensor in [*model.parameters(), *model.buffers()]):
        return
    _answer(model, few_samples(data, _FEW))


# Labels


@dataclass(frozen=True)
class LabelRange:
    """Refuses a batch with labels that the model has no output for. On the host: there it costs next to nothing."""

    classes: int
    ignored: int

    def __call__(self, batch: Batch) -> None:
        if isinstance(batch, (tuple, list)) and len(batch) > 1 and isinstance(batch[-1], torch.Tensor):
            self.check(batch[-1])

    def check(self, labels: torch.Tensor) -> None:
        if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
            return
        labels = labels[labels != self.ignored]
        if not len(labels):
            return
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.classes:
            raise BadLabels(
                f"labels go from {low} to {high}, but the model has {self.classes} outputs: they must be 0 to "
                f"{self.classes - 1}"
            )


def check_labels(model: torch.nn.Module, job: Job) -> None:
    """Labels that the model has no output for: on a GPU they would break the process, long after.

    Those of arrays are looked at now; those of a dataset or a loader batch by batch, before they go to the device.
    """
    if not (isinstance(job.objective, Supervised) and _of_classes(job.objective.loss)):
        return
    ignored = parts_of_mean(job.objective.loss)[1].get("ignore_index", IGNORED)
    try:
        scores = _answer(model, few_samples(job.train, _FEW)) if can_be_read(job.train) else None
    except Exception:  # the first step will say it, with all that belongs to it
        return
    if isinstance(scores, torch.Tensor) and scores.dim() == 2:
        look = LabelRange(scores.shape[1], ignored)
        job.train = _looked_at(job.train, look)
        job.test = None if job.test is None else _looked_at(job.test, look)


def _looked_at(data: Source, look: LabelRange) -> Source:
    if not isinstance(data, Arrays):
        return dataclasses.replace(data, look=look)
    if len(data.tensors) > 1:
        look.check(data.tensors[-1])
    return data


def _of_classes(loss: Any) -> bool:
    return is_mean_of_classes(loss) or isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss))


# The loss


def check_loss(model: torch.nn.Module, job: Job, ranks: int) -> None:
    """Refuse a loss that is no mean over samples where a batch is worked off in parts: the parts would not add up.

    Means over classes whose labels weigh differently are none, but it is known by what they divide: they are taken
    apart and put together again.
    """
    loss: Any = job.objective.loss if isinstance(job.objective, Supervised) else None
    if any(_weighs(loss, data) for data in (job.train, job.test) if data is not None):
        job.objective = Weighed(loss)
        return
    if ranks == 1 and job.settings.accumulate == 1:
        return
    if _of_classes(loss):
        _check_mean_of_classes(loss, job.train)
    if not can_be_read(job.train) or _mixes_samples(model):
        return
    try:
        whole, parts, close = _whole_and_parts(model, job)
    except Exception:  # the first step will say it, with all that belongs to it
        return
    if not math.isclose(whole, parts, rel_tol=close, abs_tol=close * 1e-3):
        raise BadSettings(
            f"the loss of {_HALVES} samples is {whole:.6g}, but that of their two halves is {parts:.6g} on average: on "
            "several devices, or with accumulate, the batch is worked off in parts, and this loss would then train "
            "another model than one device does. The loss must be the mean over the samples of the batch: divide a sum "
            "by the number of samples, or give a loss with reduction='none', of which the trainer takes the mean"
        )


def _mixes_samples(model: torch.nn.Module) -> bool:
    """Whether layers use the statistics of the batch in evaluation, too: halves then differ, and rightly."""
    return any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in model.modules())


def _weighs(loss: Any, data: Source) -> bool:
    """Whether labels may weigh differently in a loss that can be taken apart; labels that come later may."""
    if not is_mean_of_classes(loss):
        return False
    return parts_of_mean(loss)[1].get("weight") is not None or not isinstance(data, Arrays) or _leaves_out(loss, data)


def _check_mean_of_classes(loss: Any, data: Source) -> None:
    """A class of the user's own that is made of one of PyTorch's: what it divides by is not known."""
    if getattr(loss, "reduction", "mean") != "mean" or is_mean_of_classes(loss):
        return
    why = None
    if getattr(loss, "weight", None) is not None:
        why = "weights of classes"
    elif _leaves_out(loss, data):
        why = "labels that it leaves out"
    if why is not None:
        raise BadSettings(
            f"the loss {type(loss).__name__} has {why}: its mean divides by what the labels of a batch weigh, and in "
            "parts of a batch (several devices, or accumulate) that is not what it is in the whole. Give one of "
            "PyTorch's own losses, which are put together exactly, or reduction='sum' or 'none': the trainer then "
            "divides by the number of samples"
        )


def _leaves_out(loss: Any, data: Source) -> bool:
    ignored = getattr(loss, "ignore_index", parts_of_mean(loss)[1].get("ignore_index", IGNORED))
    return isinstance(data, Arrays) and _has_label(data.tensors[-1], ignored)


def _has_label(labels: torch.Tensor, ignored: int) -> bool:
    return not labels.is_floating_point() and labels.dtype != torch.bool and bool((labels == ignored).any())


def _whole_and_parts(model: torch.nn.Module, job: Job) -> tuple[float, float, float]:
    """The loss of a few samples, the mean of that of their halves, and how close these should be.

    A loss that draws random numbers says nothing: it is given as its own mean.
    """
    batch = few_samples(job.train, _HALVES)
    size = min(rows(batch), _HALVES)
    # A step of the user's own may count or remember something: it does so in a copy.
    tried = copy.deepcopy(model) if isinstance(job.objective, OwnStep) else model
    batch = as_the_model(tried, cut(batch, 0, size))
    with randomness.Own(0), _evaluating(tried):
        first, again = (_loss(tried, job, batch) for _ in range(2))
        halves = [(0, size // 2), (size // 2, size)] if size > 1 else [(0, size)]
        losses = [float(_loss(tried, job, cut(batch, *half))) * (half[1] - half[0]) for half in halves]
    whole = float(first)
    says_something = math.isfinite(whole) and torch.equal(first, again)
    return whole, sum(losses) / size if says_something else whole, _CLOSE.get(first.dtype, _OTHERWISE_CLOSE)


def _loss(model: Any, job: Job, batch: Batch) -> torch.Tensor:
    loss = model.training_step(batch) if isinstance(job.objective, OwnStep) else job.objective(model, batch)[0]
    return loss.detach()


# A few samples


def can_be_read(data: Source) -> bool:
    """Whether a look at the first samples takes none away, as it does where samples can be gone through only once."""
    return not (isinstance(data, Stream) and isinstance(data.loader, Iterator))


def few_samples(data: Source, count: int) -> Batch:
    """The first samples, or for a stream its first batch; the process's random numbers stay as they are."""
    if isinstance(data, Arrays):
        return data.take(torch.arange(min(count, data.count), device=data.tensors[0].device))
    if isinstance(data, Samples):
        plain = dataclasses.replace(data, workers=0, look=None)
        with randomness.Own(0):
            (batch,) = plain.batches([np.arange(min(count, data.count))], seed=0, pin=False, empty=False)
        return batch
    return next(dataclasses.replace(data, loader=_plain(data.loader), look=None).batches(0, 0))


def _plain(loader: Any) -> Any:
    """A loader like this one, without worker processes: what its sampler remembers stays as it is."""
    if not isinstance(loader, DataLoader):
        return loader
    try:
        plain = copy.deepcopy(loader, {id(loader.dataset): loader.dataset})
    except Exception:  # it holds something that cannot be copied
        return loader
    plain.num_workers = plain.timeout = 0
    return plain


def _answer(model: torch.nn.Module, batch: Batch) -> Any:
    """What the model answers, in evaluation mode: no statistics, no dropout."""
    numbers = [part for part in batch[:-1] if isinstance(part, torch.Tensor)]
    with _evaluating(model):
        return model(*as_the_model(model, numbers))


def as_the_model(model: torch.nn.Module, batch: Batch) -> Batch:
    """The batch where the model is, in its kind of floating-point numbers."""
    first = next(model.parameters())

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(first.device, first.dtype if leaf.is_floating_point() else None)

    return tree.map_leaves(moved, batch)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    modes = [(layer, layer.training) for layer in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, training in modes:
            layer.training = training
