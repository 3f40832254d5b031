"""PyTorch's part of the trial whether a loss is a mean over samples (:mod:`manyhands.training.loss.loss_trial`).

It runs once per job, on a copy of model and loss, in float64 where that works, and leaves the process's random numbers
as they are.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Iterator, Sequence

import cloudpickle
import numpy as np
import torch

from manyhands.errors import BadSettings
from manyhands.training.data.order import spread
from manyhands.training.data.sources import Array
from manyhands.training.loss import loss_trial
from manyhands.training.loss.loss_trial import FEW, WIDTH, Look, Pass, Term
from manyhands.training.torch.data import samples
from manyhands.training.torch.data.batches import Batch, pick, rows, tensors_in
from manyhands.training.torch.data.sources import Arrays, Samples, Stream
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import Objective, OwnStep, mixes_samples
from manyhands.training.torch.state import randomness
from manyhands.training.torch.workers import job_bytes

# Samples of a dataset among which unlike ones are searched for: reading one may take milliseconds. A count, not a time:
# all ranks must read the same ones.
_POOL = 256
_POOL_BYTES = 1 << 27  # of these samples together: large ones, pictures from files say, take long to read
_STREAMED = 2  # batches of a loader
_DOUBLE = 50_000_000  # parameters: up to that many a copy in float64 takes little memory, and says more
_COMPARED = 4_000_000  # numbers of a gradient; a larger one is sampled evenly
_PRECISIONS = {torch.float64: "float64", torch.float32: "tf32"}  # a GPU may multiply float32 in TF32


def sums(model: torch.nn.Module, job: Job) -> tuple[bool, str | None]:
    """Whether the loss comes as a sum and its count; if not, that it is a mean over samples, or a note why not checked.

    Refuses a loss that is known to be neither.
    """
    try:
        with randomness.preserved(next(model.parameters()).device):
            tried, objective = _copy(model, job.objective)
            tried.eval()  # no dropout, and no statistics of the batch
            if isinstance(objective, OwnStep):
                objective.training = True
            if not isinstance(job.train, Stream) and _is_sum(tried, objective, samples.few_samples(job.train, FEW)):
                return True, None  # no need to read more of them
            batches, seen = _batches(job)
            if _is_sum(tried, objective, batches[0]):
                return True, None
            if mixes_samples(tried):  # parts of a batch then differ from the whole, and rightly
                return False, loss_trial.note("a layer normalises over the batch")
            why: str | Exception | None = _check(tried, objective, batches)
            if why is None:
                return False, loss_trial.outcome(None, None if _is_torchs(job.objective) else seen)
    except BadSettings:
        raise
    except Exception as error:
        why = error
    return False, loss_trial.note(why)


def _copy(model: torch.nn.Module, objective: Objective) -> tuple[torch.nn.Module, Objective]:
    """Copies made as for a worker process, including what functions have closed over; else deep copies."""
    try:
        both: tuple[torch.nn.Module, Objective] = cloudpickle.loads(job_bytes.dumps((model, objective)))
    except Exception:
        both = copy.deepcopy((model, objective))
    return both


def _is_sum(model: torch.nn.Module, objective: Objective, batch: Batch) -> bool:
    with torch.no_grad():
        return objective.as_sum(model, samples.as_the_model(model, batch))[0] is not None


# Samples


def _batches(job: Job) -> tuple[list[Batch], str | None]:
    """A few batches: the most unlike samples first, then the first ones; and what they were chosen from."""
    data = job.train
    if isinstance(data, Arrays):
        chosen = loss_trial.chosen_from([_look(tensor) for tensor in data.tensors], data.count)
        batches = [samples.take(data, np.array(numbers)) for numbers in chosen.batches]
        return [*batches, samples.few_samples(data, FEW)], chosen.seen
    if isinstance(data, Stream):
        pools = list(itertools.islice(samples.first_batches(job), _STREAMED))
        return [batch for pool in pools for batch in _unlike(pool)], f"the first {_STREAMED} batches of the loader"
    size = _pool_size(data)
    seen = f"{size:,} of {data.count:,} samples" if size < data.count else None
    return list(_unlike(samples.take(data, spread(data.count, size)))), seen


def _pool_size(data: Samples) -> int:
    """How many samples to read: at most _POOL, fewer where they are large."""
    first = samples.few_samples(data, FEW)
    size = max(1, sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(first)) // rows(first))
    return min(data.count, _POOL, max(4 * FEW, _POOL_BYTES // size))


def _is_torchs(objective: Objective) -> bool:
    loss = getattr(objective, "loss", None)
    module: str = (loss if inspect.isfunction(loss) else type(loss)).__module__
    return module.startswith("torch.nn.")


def _unlike(pool: Batch) -> Iterator[Batch]:
    """Samples of a pool: the most unlike ones, then some as they come."""
    size = rows(pool)
    tensors = [tensor for tensor in tensors_in(pool) if tensor.shape[:1] == (size,)]
    chosen = loss_trial.chosen_from([_look(tensor) for tensor in tensors], size)
    yield from (pick(pool, numbers) for numbers in chosen.batches)
    yield pick(pool, list(range(min(FEW, size))))


def _look(tensor: torch.Tensor) -> Look:
    flat = tensor.reshape(len(tensor), -1)
    seen = loss_trial.sampled_rows(*flat.shape)
    sampled = flat if len(seen) == len(flat) else flat[torch.from_numpy(seen).to(flat.device)]
    return Look(_numbers(sampled[:, :WIDTH]), seen)


def _numbers(tensor: torch.Tensor) -> Array:
    """In NumPy, which has no bfloat16."""
    wide = tensor.is_floating_point() and tensor.dtype != torch.float64
    return np.asarray((tensor.detach().float() if wide else tensor.detach()).cpu().numpy())


# Losses and gradients


def _check(model: torch.nn.Module, objective: Objective, batches: Sequence[Batch]) -> str | None:
    """Refuse a loss whose whole and parts differ; or say why they could not be compared."""
    trial = _Trial(model, objective)
    if sum(parameter.numel() for parameter in model.parameters()) < _DOUBLE and not trial.works_in_double(batches[0]):
        trial = _Trial(model, objective)
    return trial.check(batches)


class _Trial:
    """A copy of the model that computes losses and gradients in one precision."""

    def __init__(self, model: torch.nn.Module, objective: Objective) -> None:
        self._model, self._objective = copy.deepcopy(model), objective
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def works_in_double(self, batch: Batch) -> bool:
        self._model.double()
        try:
            self._pass(batch)
        except Exception:  # it has tensors of its own that stay in float32
            return False
        return True

    def check(self, batches: Sequence[Batch]) -> str | None:
        def compute(batch: Batch, numbers: Sequence[int]) -> Pass:
            return self._pass(pick(batch, list(numbers)))

        return loss_trial.check(
            [(functools.partial(compute, batch), rows(batch)) for batch in batches],
            precisions=[_PRECISIONS.get(self._parameters[0].dtype, "half")],
            own_step=isinstance(self._objective, OwnStep),
        )

    def _pass(self, batch: Batch) -> Pass:
        size = rows(batch)
        with torch.enable_grad():
            loss, _ = self._objective(self._model, samples.as_the_model(self._model, batch), part=True)
        computed = torch.autograd.grad(loss, self._parameters, allow_unused=True, materialize_grads=True)
        gradients = [_numbers(_sampled_numbers(gradient)) * size for gradient in computed]
        return Pass([Term(float(loss.detach()) * size, size, gradients)])


def _sampled_numbers(gradient: torch.Tensor) -> torch.Tensor:
    """Not too many of its numbers. An odd step meets every column of a matrix, whose width is mostly even."""
    step = gradient.numel() // _COMPARED
    dense = gradient.to_dense()
    return dense.flatten()[:: step | 1] if step > 1 else dense
