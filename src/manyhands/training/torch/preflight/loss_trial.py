"""The rule of exactness: some real samples are computed whole and in unlike parts, and the two must agree.

Model and loss, value and gradient, and the state that a forward pass leaves behind are compared
(:mod:`manyhands.training.loss.loss_trial` has the comparison). Where the parts do not add up, but would with the rows
of all devices, these are gathered in every step; else the job is refused. BatchNorm's statistics and random draws are
the exceptions.

It runs once per job with more than one part, on a copy of model and loss, in float64 where that works, and leaves the
process's random numbers as they are. Samples are chosen from all of an array, from at most 256 of a dataset, and from
the first batch of a loader.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.amounts import bytes_in_words
from manyhands.errors import BadBatch, BadSettings
from manyhands.training.data.order import spread
from manyhands.training.data.sources import Array
from manyhands.training.loss import loss_trial
from manyhands.training.loss.loss_trial import FEW, WIDTH, Difference, Pass
from manyhands.training.torch.data.batches import Batch, check_asked, pick, rows, tensors_in
from manyhands.training.torch.data.sources import Arrays, Samples, Stream
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import OwnStep, Supervised, makes_updates
from manyhands.training.torch.preflight.trial_model import Part, TrialModel, numbers
from manyhands.training.torch.ranks.whole_batch import Rows
from manyhands.training.torch.state import randomness
from manyhands.training.torch.step.known_means import is_mean_of_classes

# Samples of a dataset among which unlike ones are searched for. A count, not a time: all ranks must read the same ones.
_POOL, _POOL_BYTES = 256, 1 << 28  # fewer where they are large
_DOUBLE = 50_000_000  # parameters: up to that many a copy in float64 takes little memory, and says more
_PRECISIONS = {torch.float64: "float64", torch.float32: "tf32"}  # a GPU may multiply float32 in TF32
_GATHERED = 2 << 30  # bytes of a batch that are gathered at most
_READ_BACK = 1e-6  # relative: what a pass may differ from the one before that has changed the state
_OF_UPDATES = (
    "training_step(batch, optimizers): several devices make the update of one if each loss is a mean over samples or "
    "an mh.LossSum, which the trainer cannot try out here"
)
_NO_BATCH = "no device has the whole batch at once: leave accumulate=1, on more devices or with smaller batches"
_IN_PARTS = f"it needs the whole batch, and with accumulate {_NO_BATCH}"
_TOGETHER = (
    "gather the rows that are compared from all devices, tensor = mh.whole_batch(tensor), in the model or its "
    "training_step, or train on one device with accumulate=1"
)


def check_loss(model: torch.nn.Module, job: Job, ranks: int, device: torch.device) -> None:
    """Find out how the parts of a batch, which is processed in parts, are put together; refuse what cannot be."""
    objective = job.objective
    if isinstance(objective, OwnStep) and makes_updates(model):  # to try a loss would be to train
        job.notes.append(_OF_UPDATES)
        objective.rows = Rows()
        return
    try:
        with randomness.preserve(device):
            _Trial(model, job, ranks, device).decide()
    except (BadBatch, BadSettings):
        raise
    except Exception as error:
        job.notes.append(loss_trial.note(error))
        is_mean = isinstance(objective, Supervised) and is_mean_of_classes(objective.loss)
        objective.sums = is_mean and not getattr(objective, "is_default", False)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


class _Trial:
    """The trial of one objective of a job."""

    def __init__(self, model: torch.nn.Module, job: Job, ranks: int, device: torch.device) -> None:
        self._job, self._ranks, self._micro = job, ranks, job.settings.step.accumulate > 1
        self._batches = _batches(job)
        self._few = few = self._batches[0]
        self._copy = TrialModel(model, job.objective, device)
        if sum(p.numel() for p in model.parameters()) < _DOUBLE and not self._copy.becomes_double(few.whole):
            self._copy = TrialModel(model, job.objective, device)
        objective = self._copy.objective
        objective.sums = self._copy.gives_sum(few.whole)
        if objective.sums or objective.is_mean(model):  # how labels weigh in it is known
            self._batches = [few]
        self._close = loss_trial.tolerances([_PRECISIONS.get(self._copy.precision, "half")])

    def decide(self) -> None:
        """How the parts of the job's batches are put together."""
        copy, objective = self._copy, self._copy.objective
        outcome = self._compare()
        if copy.asks_for_rows:
            objective.rows = Rows()
            if self._micro:
                raise BadSettings(f"mh.whole_batch is called, and with accumulate {_NO_BATCH}")
        draws = outcome == loss_trial.DRAWS
        differing = self._check_state(draws=draws)
        if draws:  # once more, where no layer draws, of whatever kind
            copy.model.eval()
            outcome = self._compare()
        if isinstance(outcome, Difference) or (copy.asks_for_rows and outcome is None):
            try:
                self._gather(outcome)
            except BadSettings:
                raise
            except Exception as error:  # rows of other widths, say: what is known to differ must not begin
                raise BadSettings(self._refusal(outcome)) from error
        elif outcome is not None:
            self._job.notes.append(loss_trial.note(outcome))
        if self._ranks > 1 and copy.changed and objective.rows is None and not differing:
            objective.rows = Rows()  # every rank changes it in every step, also one without samples
        self._job.objective.sums, self._job.objective.rows = objective.sums, objective.rows

    def _compare(self) -> Difference | str | None:
        def compute(few: Few, chosen: Sequence[int]) -> Pass:
            return self._copy.compute(few.part(chosen))

        return loss_trial.compare([(functools.partial(compute, few), few.size) for few in self._batches], self._close)

    def _check_state(self, *, draws: bool) -> set[str]:
        """What parts leave in another state than the whole; refused, unless training does not read it."""
        copy, few = self._copy, self._few
        if not copy.changed:
            return set()
        (expected,), parts = copy.one_by_one([few.whole]), few.divisions[-1]
        runs = [copy.one_by_one(parts)[-1]] if self._micro else []
        if self._ranks > 1 and copy.objective.rows is not None:
            runs += copy.together(parts)
        elif self._ranks > 1:
            runs += [copy.one_by_one([part])[0] for part in parts]
        names = {name for run in runs for name in copy.differences(expected, run)}
        if not names:
            return names
        trained = names & {name for name, _ in copy.model.named_parameters()}
        if not draws and (trained or self._reads_back()):
            raise BadSettings(
                f"the forward pass changes {_list(names)}, and for parts of a batch in another way than for the whole: "
                "training would compute something else than on one device. Train there with accumulate=1, change it in "
                "the optimizer's step (register_step_post_hook), or compute it from mh.whole_batch(tensor)"
            )
        self._job.notes.append(
            f"{_list(names)}: updated from each part of a batch for itself, as the statistics of BatchNorm are"
        )
        return names

    def _reads_back(self) -> bool:
        """Whether a pass has another loss or gradient after what the one before it has changed."""
        before, after = self._copy.compute(self._few.whole), self._copy.compute_again(self._few.whole)
        return not loss_trial.are_close(before, after, [before], (_READ_BACK, _READ_BACK))

    def _gather(self, outcome: Difference | str | None) -> None:
        """Find what has to be gathered, so that all devices together compute what one does; else refuse."""
        copy, width = self._copy, 0
        if copy.objective.rows is None and self._ranks > 1 and not self._micro:
            copy.objective.rows, width = copy.find_rows(self._few.whole, self._few.divisions[-1][1]) or (None, 0)
        if copy.objective.rows is None or not self._is_exact_together():
            raise BadSettings(self._refusal(outcome))
        if width * self._job.settings.batch_size > _GATHERED:
            raise BadSettings(
                f"the loss needs the outputs of the whole batch, {bytes_in_words(width)} a sample, on every device: "
                "too much to gather. For a mean over tokens or pixels return mh.LossSum(total, count)"
            )
        if width:
            self._job.notes.append(
                "the loss needs the whole batch: outputs and targets of all devices are gathered in every step, "
                f"{bytes_in_words(width)} a sample"
            )

    def _is_exact_together(self) -> bool:
        for few in self._batches:
            whole = self._copy.compute(few.whole)
            for parts in few.divisions:
                together = self._copy.compute_together(parts)
                if not loss_trial.are_close(whole, together, [together], self._close):
                    return False
        return True

    def _refusal(self, outcome: Difference | str | None) -> str:
        if not isinstance(outcome, Difference):
            return (
                "training_step gathers rows with mh.whole_batch, but computes something else on several devices than "
                "on one: gather every tensor whose samples are compared, and compute the same on each device"
            )
        own_step = isinstance(self._job.objective, OwnStep)
        return outcome.refusal(own_step, _TOGETHER if self._ranks > 1 and not self._micro else _IN_PARTS)


def _list(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(map(repr, shown)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# Samples


@dataclass(frozen=True)
class Few:
    """A few samples, any of which can be had as a batch."""

    take: Callable[[list[int]], Batch]
    samples: Sequence[int]  # their numbers

    @property
    def size(self) -> int:
        return len(self.samples)

    def part(self, chosen: Sequence[int]) -> Part:
        return self.take([self.samples[each] for each in chosen]), len(chosen)

    @property
    def whole(self) -> Part:
        return self.part(range(self.size))

    @property
    def divisions(self) -> list[list[Part]]:
        """In two unlike parts."""
        middles = sorted({1, 3 * self.size // 8} - {0})
        return [[self.part(range(middle)), self.part(range(middle, self.size))] for middle in middles]


def _batches(job: Job) -> list[Few]:
    """A few batches of real samples, the most unlike ones first."""
    data, seeds = job.train, itertools.count()
    if isinstance(data, Stream):
        batch, job.train = data.first_batch()
        size = rows(batch)
        looked_at: Sequence[int] = range(size)

        def take(chosen: list[int]) -> Batch:
            return pick(batch, chosen)

    else:
        looked_at = range(data.count) if isinstance(data, Arrays) else _pool(data)
        batch, size = data.tensors if isinstance(data, Arrays) else data.pick(np.array(looked_at)), len(looked_at)

        def take(chosen: list[int]) -> Batch:  # collated anew: what a collate function draws (mixup) is drawn anew
            part = data.pick(np.array(chosen), next(seeds))
            check_asked(part, len(chosen))
            return part

    tensors = [tensor.reshape(size, -1) for tensor in tensors_in(batch) if tensor.shape[:1] == (size,)]

    def read(number: int, samples: NDArray[np.int64]) -> Array:
        flat = tensors[number][:, :WIDTH]
        return numbers(flat[torch.from_numpy(samples).to(flat.device)])

    chosen = loss_trial.unlike([tensor.shape[1] for tensor in tensors], size, read)
    return [Few(take, [looked_at[each] for each in few]) for few in [*chosen, list(range(min(FEW, size)))]]


def _pool(data: Samples) -> list[int]:
    """The samples of a dataset that are read to choose from."""
    few = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(data.few(FEW)))
    samples: list[int] = spread(data.count, min(_POOL, max(4, _POOL_BYTES // max(1, few)) * FEW)).tolist()
    return samples
