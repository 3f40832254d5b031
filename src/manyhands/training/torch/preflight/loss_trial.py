"""PyTorch's part of the trial whether the parts of a batch add up (:mod:`manyhands.training.loss.loss_trial`).

It runs once per job, on a copy of model and loss, in float64 where that works, and leaves the process's random numbers
as they are. Where the parts do not add up, but would with the rows of all devices, these are gathered in every step.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from manyhands.amounts import bytes_in_words
from manyhands.errors import BadBatch, BadSettings
from manyhands.training.data.order import spread
from manyhands.training.loss import loss_trial
from manyhands.training.loss.loss_trial import FEW, WIDTH, Difference, Look
from manyhands.training.torch.data import samples
from manyhands.training.torch.data.batches import Batch, check_asked, pick, rows, tensors_in
from manyhands.training.torch.data.sources import Arrays, Samples, Stream
from manyhands.training.torch.job import Job
from manyhands.training.torch.objective import Objective, OwnStep
from manyhands.training.torch.preflight.trial_model import TrialModel, numbers
from manyhands.training.torch.ranks.whole_batch import Rows
from manyhands.training.torch.state import randomness

# Samples of a dataset among which unlike ones are searched for: reading one may take milliseconds. A count, not a time:
# all ranks must read the same ones.
_POOL = 256
_POOL_BYTES = 1 << 27  # of these samples together: large ones, pictures from files say, take long to read
_STREAMED = 2  # batches of a loader
_DOUBLE = 50_000_000  # parameters: up to that many a copy in float64 takes little memory, and says more
_PRECISIONS = {torch.float64: "float64", torch.float32: "tf32"}  # a GPU may multiply float32 in TF32
_GATHERED = 2 << 30  # bytes of a batch that are gathered at most


@dataclass
class Answer:
    """How the parts of a batch are put together, and what is to be said about it."""

    sums: bool = False  # sums and their counts are added up; otherwise means over samples
    rows: Rows | None = None  # what is gathered, for a loss that needs the whole batch
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Few:
    """A few samples: any of them can be had as a batch."""

    take: Callable[[Sequence[int]], Batch]
    size: int

    def part(self, begin: int, end: int) -> tuple[Batch, int]:
        return self.take(range(begin, end)), end - begin

    @property
    def whole(self) -> tuple[Batch, int]:
        return self.part(0, self.size)

    @property
    def divisions(self) -> list[list[tuple[Batch, int]]]:
        """In two unlike parts."""
        middles = sorted({1, 3 * self.size // 8} - {0})
        return [[self.part(0, middle), self.part(middle, self.size)] for middle in middles]


def try_parts(model: torch.nn.Module, job: Job, *, ranks: int, device: torch.device) -> Answer:
    """How parts add up to the batch. Refuses a model or a loss whose parts are known not to."""
    try:
        with randomness.preserved(device):
            return _Trial(model, job, ranks, device).answer()
    except (BadBatch, BadSettings):
        raise
    except Exception as error:
        note = loss_trial.note(error)
        return Answer(sums=bool(job.objective.sums), notes=[] if note is None else [note])
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


class _Trial:
    """The trial of one objective of a job."""

    def __init__(self, model: torch.nn.Module, job: Job, ranks: int, device: torch.device) -> None:
        self._job, self._ranks, self._micro = job, ranks, job.settings.step.accumulate > 1
        self._batches, self._seen = _batches(job)
        few = self._batches[0]
        self._copy = TrialModel(model, job.objective, device)
        if sum(p.numel() for p in model.parameters()) < _DOUBLE and not self._copy.becomes_double(*few.whole):
            self._copy = TrialModel(model, job.objective, device)
        if self._copy.objective.sums is None:
            self._copy.objective.sums = self._copy.gives_sum(few.whole[0])
        self._differing: set[str] = set()  # what parts of a batch change in another way than the whole
        self._close = loss_trial.tolerances([_PRECISIONS.get(self._copy.precision, "half")])
        if self._copy.objective.sums or _is_torchs(job.objective):
            self._batches, self._seen = self._batches[:1], None  # how labels weigh in it is known

    def answer(self) -> Answer:
        copy = self._copy
        outcome = self._compared()
        answer = Answer(sums=bool(copy.objective.sums))
        if copy.asks_for_rows:
            answer.rows = copy.objective.rows = Rows()
            if self._micro:
                raise BadSettings(f"mh.whole_batch is called, and with accumulate {_NO_BATCH}")
        draws = outcome == loss_trial.DRAWS
        self._check_state(answer, draws=draws)
        if draws:  # once more, where no layer draws
            copy.evaluate()
            outcome = self._compared()
        if isinstance(outcome, Difference) or (copy.asks_for_rows and outcome is None):
            try:
                self._gather(answer, outcome)
            except BadSettings:
                raise
            except Exception as error:  # rows of other widths, say: what is known to differ must not begin
                raise BadSettings(self._refusal(outcome)) from error
            outcome = None
        if self._ranks > 1 and copy.changed and answer.rows is None and not self._differing:
            answer.rows = Rows()  # every rank changes it in every step, also one without samples
        said = loss_trial.outcome(outcome, self._seen)
        if said is not None:
            answer.notes.append(said)
            if outcome is None and isinstance(self._job.train, Stream):
                answer.warnings.append(said)
        return answer

    def _compared(self) -> Difference | str | None:
        def compute(few: Few, chosen: Sequence[int]) -> loss_trial.Pass:
            return self._copy.compute(few.take(chosen), len(chosen), whole=len(chosen) == few.size)

        return loss_trial.compare([(functools.partial(compute, few), few.size) for few in self._batches], self._close)

    def _check_state(self, answer: Answer, *, draws: bool) -> None:
        """Refuse a forward pass that leaves another state behind for parts, unless training does not read it."""
        copy, few = self._copy, self._batches[0]
        if not copy.changed:
            return
        names = copy.differing_state(few.whole, few.divisions[-1], devices=self._ranks > 1, micro_batches=self._micro)
        self._differing = names
        if not names:
            return
        trained = names & {name for name, _ in copy.model.named_parameters()}
        if not draws and (trained or copy.reads_back(*few.whole)):
            raise BadSettings(
                f"the forward pass changes {_listed(names)}, and for parts of a batch in another way than for the "
                "whole: on several devices, or with accumulate, a batch is processed in parts, and training would "
                "compute something else than on one device. Train on one device with accumulate=1, change it in the "
                "optimizer's step (optimizer.register_step_post_hook), or compute it from mh.whole_batch(tensor)"
            )
        answer.notes.append(
            f"{_listed(names)}: updated from each part of a batch for itself, as the statistics of BatchNorm are"
        )

    def _gather(self, answer: Answer, outcome: Difference | str | None) -> None:
        """Find what has to be gathered, so that all devices together compute what one does; else refuse."""
        copy, few = self._copy, self._batches[0]
        width = 0
        if answer.rows is None and self._ranks > 1 and not self._micro:
            found = copy.find_rows(few.whole, few.divisions[-1][1])
            answer.rows, width = found or (None, 0)
        copy.objective.rows = answer.rows
        if answer.rows is None or not self._is_exact_together():
            raise BadSettings(self._refusal(outcome))
        if width * self._job.settings.batch_size > _GATHERED:
            raise BadSettings(
                f"the loss needs the outputs of the whole batch, {bytes_in_words(width)} a sample, on every device: "
                "too much to gather. For a mean over tokens or pixels return mh.LossSum(total, count); else give "
                "smaller batches, or train on one device"
            )
        if width:
            answer.notes.append(
                "the loss needs the whole batch: outputs and targets of all devices are gathered in every step, "
                f"{bytes_in_words(width)} a sample"
            )

    def _is_exact_together(self) -> bool:
        for few in self._batches:
            whole = self._copy.compute(*few.whole)
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


_NO_BATCH = "no device has the whole batch at once: leave accumulate=1, on more devices or with smaller batches"
_IN_PARTS = f"it needs the whole batch, and with accumulate {_NO_BATCH}"
_TOGETHER = (
    "gather the rows that are compared from all devices, tensor = mh.whole_batch(tensor), in the model or its "
    "training_step, or train on one device with accumulate=1"
)


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(map(repr, shown)) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_torchs(objective: Objective) -> bool:
    loss = getattr(objective, "loss", None)
    module: str = (loss if inspect.isfunction(loss) else type(loss)).__module__
    return module.startswith("torch.nn.")


# Samples


def _batches(job: Job) -> tuple[list[Few], str | None]:
    """A few batches: the most unlike samples first, then the first ones; and what they were chosen from."""
    data = job.train
    if isinstance(data, Stream):
        pools = list(itertools.islice(samples.first_batches(job), _STREAMED))
        return [few for pool in pools for few in _unlike(pool)], f"the first {_STREAMED} batches of the loader"
    if isinstance(data, Arrays):
        chosen = loss_trial.chosen_from([_look(tensor) for tensor in data.tensors], data.count)
        seen, picked = chosen.seen, chosen.batches
    else:
        size = _pool_size(data)
        seen = f"{size:,} of {data.count:,} samples" if size < data.count else None
        pool = spread(data.count, size)
        picked = [pool[each].tolist() for each in _chosen(samples.take(data, pool), size)]
    return [_numbered(data, each) for each in [*picked, list(range(min(FEW, data.count)))]], seen


def _numbered(data: Arrays | Samples, chosen: Sequence[int]) -> Few:
    """Samples by their numbers: each part is collated for itself, and draws for itself (mixup)."""
    seeds = itertools.count()

    def take(some: Sequence[int]) -> Batch:
        batch = samples.take(data, np.array([chosen[each] for each in some]), next(seeds))
        check_asked(batch, len(some))
        return batch

    return Few(take, len(chosen))


def _unlike(pool: Batch) -> Iterator[Few]:
    """Samples of a loader's batch, which is cut: the most unlike ones, then some as they come."""
    size = rows(pool)
    for chosen in [*_chosen(pool, size), list(range(min(FEW, size)))]:
        yield Few(functools.partial(_picked, pool, chosen), len(chosen))


def _picked(pool: Batch, chosen: Sequence[int], some: Sequence[int]) -> Batch:
    return pick(pool, [chosen[each] for each in some])


def _chosen(pool: Batch, size: int) -> list[list[int]]:
    tensors = [tensor for tensor in tensors_in(pool) if tensor.shape[:1] == (size,)]
    return loss_trial.chosen_from([_look(tensor) for tensor in tensors], size).batches


def _pool_size(data: Samples) -> int:
    """How many samples to read: at most _POOL, fewer where they are large."""
    first = samples.few_samples(data, FEW)
    count = min(FEW, data.count)
    size = max(1, sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(first)) // count)
    return min(data.count, _POOL, max(4 * FEW, _POOL_BYTES // size))


def _look(tensor: torch.Tensor) -> Look:
    flat = tensor.reshape(len(tensor), -1)
    seen = loss_trial.sampled_rows(*flat.shape)
    sampled = flat if len(seen) == len(flat) else flat[torch.from_numpy(seen).to(flat.device)]
    return Look(numbers(sampled[:, :WIDTH]), seen)
