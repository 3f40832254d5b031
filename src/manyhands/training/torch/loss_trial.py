"""Is a loss that we cannot look into a mean over samples? Found out on real batches, before a job begins.

On several devices, or with ``accumulate``, a batch is processed in parts. The mean of the parts' losses, weighted by
their samples, is the loss of the batch only if the loss is a mean over samples. A mean over tokens is not, if the
texts are unequally long. So a copy of the model computes the loss and its gradients for a whole batch and for parts of
it, and both must agree. Three things make the answer sure:

- Samples are picked that are as unlike as possible: labels of every kind, targets with little and with much padding.
- Gradients are compared, not values alone: with a last layer of zeros every sample has the same loss.
- Parts are single samples, and halves with the small losses in one and the large ones in the other.

For example a mean over tokens, of two texts with 1 and 3 tokens whose losses are 4 and 2, 2, 2::

    whole   (4 + 2 + 2 + 2) / 4 = 2.5
    parts   (4 / 1 + 6 / 3) / 2 = 3.0     -> refused

The trial runs once per job, on a copy of model and loss, and leaves the process's random numbers as they are.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import cloudpickle
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands import tree
from manyhands.errors import BadSettings
from manyhands.training.order import spread
from manyhands.training.torch import randomness, samples, sending
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import Objective, OwnStep
from manyhands.training.torch.sources import Arrays, Batch, Samples, Stream, pick, rows

_FEW = 8  # samples of a batch that is tried
_POOL = {Arrays: 1024, Samples: 32}  # samples among which unlike ones are looked for; reading a dataset costs something
_STREAMED = 2  # batches of a loader
_DOUBLE = 50_000_000  # parameters: up to that many a copy in float64 takes little memory, and says more
_CLOSE = {torch.float64: 1e-7, torch.float32: 1e-3}
_OTHERWISE_CLOSE = 3e-2
_SMALL = 1e-3  # of all gradients: those of a parameter that are smaller may be nothing but rounding


@dataclass
class _Pass:
    """The loss and the gradients of some samples."""

    loss: float
    gradients: list[torch.Tensor]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and all(bool(torch.isfinite(one).all()) for one in self.gradients)


def sums(model: torch.nn.Module, job: Job) -> tuple[bool, str | None]:
    """Whether the loss comes as a sum and its count; if not, that it is a mean over samples, or a note why not checked.

    Refuses a loss that is known to be neither.
    """
    try:
        with randomness.kept(next(model.parameters()).device):
            tried, objective = _copy(model, job.objective)
            tried.eval()  # no dropout, and no statistics of the batch
            if isinstance(objective, OwnStep):
                objective.training = True
            batches = list(_batches(job))
            if _is_sum(tried, objective, batches[0]):
                return True, None
            note = _mixes_samples(tried) or _check(tried, objective, batches)
    except BadSettings:
        raise
    except Exception as error:  # the first step will say it, with all that belongs to it
        note = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if note is None:
        return False, None
    return False, f"it was not checked whether the loss is a mean over the samples, as several parts need it ({note})"


def _copy(model: torch.nn.Module, objective: Objective) -> tuple[torch.nn.Module, Objective]:
    """Both as a worker process would get them, with what their functions hold; else as PyTorch copies them."""
    try:
        both: tuple[torch.nn.Module, Objective] = cloudpickle.loads(sending.dumps((model, objective)))
    except Exception:
        both = copy.deepcopy((model, objective))
    return both


def _is_sum(model: torch.nn.Module, objective: Objective, batch: Batch) -> bool:
    with torch.no_grad():
        return objective.as_sum(model, samples.as_the_model(model, batch))[0] is not None


def _mixes_samples(model: torch.nn.Module) -> str | None:
    """Layers that use the statistics of the batch in evaluation, too: parts then differ, and rightly."""
    if any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in model.modules()):
        return "a layer normalises over the batch"
    return None


# Samples


def _batches(job: Job) -> Iterator[Batch]:
    """A few batches: the most unlike samples first, then some as they come."""
    for pool in _pools(job):
        size = rows(pool)
        yield pick(pool, _unlike(pool, size))
        yield pick(pool, list(range(min(_FEW, size))))


def _pools(job: Job) -> Iterator[Batch]:
    data = job.train
    if isinstance(data, Stream):
        yield from itertools.islice(samples.first_batches(job), _STREAMED)
        return
    assert data.count is not None
    yield samples.take(data, spread(data.count, _POOL[type(data)]))


def _unlike(batch: Batch, size: int) -> list[int]:
    """Rows that differ as much as possible: in the target first, which is the last part of most batches."""
    leaves = [leaf for leaf in tree.flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (size,)]
    wishes = [list(_extremes(leaf)) for leaf in reversed(leaves)]
    in_turns = [row for turn in itertools.zip_longest(*wishes) for row in turn if row is not None]
    chosen = list(dict.fromkeys([*in_turns, *spread(size, _FEW).tolist()]))[:_FEW]
    return sorted(chosen)


def _extremes(leaf: torch.Tensor) -> Iterator[int]:
    """The rows of a tensor that are the furthest apart: by padding, by value, and by kind of label."""
    flat = leaf.detach().reshape(len(leaf), -1)[:, :4096].cpu()
    if not flat.shape[1] or flat.is_complex():
        return
    if not flat.is_floating_point():
        usual = flat.flatten().mode().values
        padding = (flat == usual).sum(1)
        yield from (int(padding.argmax()), int(padding.argmin()))
    means = flat.double().mean(1)
    yield from (int(means.argmax()), int(means.argmin()))
    if flat.shape[1] == 1 and not flat.is_floating_point():
        kinds = flat[:, 0].unique()
        for kind in kinds[:: max(1, len(kinds) // _FEW)].tolist():
            yield int((flat[:, 0] == kind).nonzero()[0])


# Whole and parts


def _check(model: torch.nn.Module, objective: Objective, batches: Sequence[Batch]) -> str | None:
    """Refuse a loss of which whole and parts differ; or say why they could not be compared."""
    trial = _Trial(model, objective)
    if sum(one.numel() for one in model.parameters()) < _DOUBLE and not trial.works_in_double(batches[0]):
        trial = _Trial(model, objective)
    compared = False
    for batch in batches:
        whole, again = trial.of(batch), trial.of(batch)
        if not (whole.is_finite and again.is_finite):
            continue
        if trial.distance(whole, again, [again]) > 1:
            return "it draws random numbers"
        for parts, passes in _divisions(trial, batch):
            compared = True
            mean = _mean(passes, parts)
            if trial.distance(whole, mean, passes) > 1:
                raise BadSettings(_refusal(objective, whole.loss, mean.loss, rows(batch), len(parts)))
    return None if compared else "it is NaN, or fails for a part of a batch"


def _divisions(trial: _Trial, batch: Batch) -> Iterator[tuple[list[Batch], list[_Pass]]]:
    """Single samples; halves by their losses; halves as they come. Those that fail are left out."""
    size = rows(batch)
    if size < 2:
        return
    singles = [pick(batch, [row]) for row in range(size)]
    orders = [list(range(size))]
    if (passes := trial.of_all(singles)) is not None:
        losses = [one.loss for one in passes]
        orders.insert(0, sorted(range(size), key=losses.__getitem__))
        yield singles, passes
    for order in orders:
        halves = [pick(batch, order[: size // 2]), pick(batch, order[size // 2 :])]
        if (passes := trial.of_all(halves)) is not None:
            yield halves, passes


class _Trial:
    """A copy of the model that computes losses and gradients in one precision."""

    def __init__(self, model: torch.nn.Module, objective: Objective) -> None:
        self._model, self._objective = copy.deepcopy(model), objective
        self._parameters = [one for one in self._model.parameters() if one.requires_grad]

    def works_in_double(self, batch: Batch) -> bool:
        self._model.double()
        try:
            self.of(batch)
        except Exception:  # it has tensors of its own that stay in float32
            return False
        return True

    def of(self, batch: Batch) -> _Pass:
        with torch.enable_grad():
            loss, _ = self._objective(self._model, samples.as_the_model(self._model, batch), part=True)
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        zipped = zip(found, self._parameters, strict=True)
        return _Pass(float(loss.detach()), [torch.zeros_like(p) if one is None else one for one, p in zipped])

    def of_all(self, parts: Sequence[Batch]) -> list[_Pass] | None:
        """None where a part fails: a layer may want more than one sample."""
        try:
            passes = [self.of(part) for part in parts]
        except Exception:
            return None
        return passes if all(one.is_finite for one in passes) else None

    def distance(self, whole: _Pass, other: _Pass, passes: Sequence[_Pass]) -> float:
        """How far apart two are, at most, as a multiple of what rounding explains."""
        kind = self._parameters[0].dtype
        close = _CLOSE.get(kind, _OTHERWISE_CLOSE)
        value = abs(whole.loss - other.loss) / (sum(abs(one.loss) for one in passes) / len(passes) or 1.0)
        scales = [max(float(g.norm()) for g in column) for column in zip(*(p.gradients for p in passes), strict=True)]
        least = _SMALL * math.hypot(*scales) or 1.0
        apart = [float((a - b).norm()) for a, b in zip(whole.gradients, other.gradients, strict=True)]
        return max(value, *(d / max(scale, least) for d, scale in zip(apart, scales, strict=True))) / close


def _mean(passes: Sequence[_Pass], parts: Sequence[Batch]) -> _Pass:
    """Those of all parts together, each weighted by its samples."""
    sizes = [rows(part) for part in parts]
    weights = [size / sum(sizes) for size in sizes]
    loss = sum(one.loss * weight for one, weight in zip(passes, weights, strict=True))
    columns = zip(*(one.gradients for one in passes), strict=True)
    gradients = [torch.stack([g * w for g, w in zip(column, weights, strict=True)]).sum(0) for column in columns]
    return _Pass(loss, gradients)


def _refusal(objective: Objective, whole: float, parts: float, size: int, number: int) -> str:
    if isinstance(objective, OwnStep):
        advice = "return the sum and what it is divided by from training_step: mh.LossSum(total, count)"
    else:
        advice = (
            "let the loss return the sum and what it is divided by, mh.LossSum(total, count); or one loss per sample "
            "(reduction='none'), of which the trainer takes the mean"
        )
    advice += ". A loss that compares samples with each other needs the whole batch: one device, and accumulate=1"
    values = f"it is {whole:.6g} for {size} samples, and {parts:.6g} on average over {number} parts of them"
    if math.isclose(whole, parts, rel_tol=1e-4):
        values = f"the gradients of {size} samples are not the mean of those of {number} parts of them"
    return (
        f"the loss is not a mean over the samples of a batch: {values}. On several devices, or with accumulate, a "
        "batch is processed in parts, and this loss would then train another model than one device does. To train with "
        f"it, {advice}"
    )
