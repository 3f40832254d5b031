"""PyTorch's learner: what one rank of a job does. A job on one device is a world of one rank.

A rank owns parts: the replicas (:mod:`.ranks.replicas`: its model), the feed (:mod:`.ranks.division`), the objective,
the rates (:mod:`.schedulers`), the steps (:mod:`.step.steps`) and its state (:mod:`.state.checkpoint`). Nothing in a
step makes the host wait: shards are on their way before they are needed and losses stay on the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Averaging
from manyhands.training.data.order import Cursor, Window
from manyhands.training.learner import Saved, Say, Take
from manyhands.training.loop import Loop
from manyhands.training.running_sums import Totals
from manyhands.training.torch.data import feed
from manyhands.training.torch.data.batches import Shard
from manyhands.training.torch.data.feed import Division
from manyhands.training.torch.data.sources import Source
from manyhands.training.torch.evaluation import Evaluation
from manyhands.training.torch.job import Job, NumberFormat, number_format_for
from manyhands.training.torch.objective import OwnStep, makes_updates, place
from manyhands.training.torch.optimizers import Several
from manyhands.training.torch.ranks import division, global_batch_norm
from manyhands.training.torch.ranks.division import RankFeed
from manyhands.training.torch.ranks.replicas import Replicas
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.schedulers import Rates, schedulers_of
from manyhands.training.torch.state import checkpoint, job_state, lent_model, randomness
from manyhands.training.torch.state.module_state import ModuleState
from manyhands.training.torch.step.average import Average
from manyhands.training.torch.step.running_sums import RunningSums
from manyhands.training.torch.step.steps import RankSteps


def loop_of(job: Job, world: World, say: Say) -> tuple[Loop, Rank]:
    """The loop that does this rank's part of a job, and the learner that it drives."""
    rank = Rank(job, world)
    loop = Loop(
        rank,
        job.settings,
        say,
        schedule=job.schedule,
        run=job.run,
        resume=job.resume,
        callbacks=job.callbacks,
        metrics=job.metrics,
        lend_model=None if rank.sharded else functools.partial(lent_model.lend, rank),
    )
    if rank.world.first:
        rank.announce = loop.report.note
    return loop, rank


class Rank:
    """One rank while it works; a :class:`~manyhands.training.learner.Learner`."""

    framework = "torch"
    keeps_precision = True  # of a checkpoint, with precision="auto"
    chosen_precision: tuple[str, str] | None = None  # by precision="auto", and why

    def __init__(self, job: Job, world: World) -> None:
        self.job, self.world, self.settings = job, world, job.settings
        self.rank, self.size = world.rank, world.size
        self.notes: list[str] = [*job.notes]
        self.announce: Callable[[str], None] = lambda text: None  # shows a line to the user while the job runs
        self.metrics = RunningSums(world.device)
        randomness.seed_all(randomness.mixed_seed(job.settings.seed, world.rank))
        self.number_format = number_format_for(job, world.device)
        _check_options(job, world)
        self.replicas = _replicas(job, world, self.number_format)
        self.model = self.replicas.model
        self.module_state = ModuleState(self.model)
        self.objective = place(job.objective, world.device, self.number_format.dtype)
        self._choose_optimizer(job)
        self.averaging: Averaging | None = None
        self._evaluation: Evaluation | None = None
        try:
            self.feed = self._feed(job, world)
            self.data = self.feed.data
            self.test = feed.resident(job.test, world.device) if job.test is not None else None
            if self.test is not None and world.first and not self.sharded and job.resume is None:
                self._new_evaluation(self.test).try_first_batch()
            self.steps = RankSteps(self)
        except BaseException:
            self.rates.close()  # a job that is refused leaves the caller's scheduler alone
            raise

    def _choose_optimizer(self, job: Job) -> None:
        configured = job.make_optimizer(self.model)
        self.optimizer = optimizer = configured.optimizer
        job_state.settle(optimizer)
        self.scheduler = schedulers_of(job.schedule, configured, self.model) if job.purpose == "fit" else None
        self.rates = Rates(optimizer, self.scheduler)
        self.optimizer_name = optimizer.name if isinstance(optimizer, Several) else type(optimizer).__name__
        self.optimizer_options = job_state.optimizer_options(optimizer)

    def _feed(self, job: Job, world: World) -> RankFeed:
        several, global_stats = world.size > 1, job.settings.step.batch_stats == "global"
        # Statistics over the whole batch need every rank in every layer, also one without samples.
        all_meet = global_stats or self.sharded or isinstance(self.optimizer, Several) or job.objective.rows is not None
        least = 2 if several and not global_stats and global_batch_norm.normalises_batches(self.model) else 1
        empty = several and all_meet
        settings = job.settings
        division = Division(world, settings.fixed_shares, least, settings.step.accumulate, empty)
        return RankFeed(job.train, settings, division, self._measured_shares)

    def _measured_shares(self, shard: Shard | None) -> list[float]:
        shares, note = division.measure_shares(self.model, self.objective, shard, self.number_format, self.world)
        self.notes.append(note)
        return shares

    @property
    def shares(self) -> list[float] | None:
        return self.feed.shares

    @property
    def sharded(self) -> bool:
        return self.replicas.sharded

    def update_caller_model(self) -> None:
        """After sharded training, put the whole weights into the caller's model; all ranks take part."""
        self.model = self.replicas.into_caller_model()

    def close(self) -> None:
        """Undo what the job did to the model and the optimizer."""
        self.steps.close()
        self.replicas.close()
        self.rates.close()

    def batches(self, cursor: Cursor) -> Iterator[tuple[Window, Shard | None]]:
        return self.steps.batches(cursor)

    def step(self, window: Window, batch: Shard | None, factor: float | None) -> None:
        self.steps.make(window, batch, factor)
        if self.scheduler is not None:
            self.scheduler.after_step()

    # Totals

    def peek(self) -> Totals | None:
        return self.metrics.peek()

    def send_totals(self, step: int) -> None:
        self.metrics.send(step, self.world)

    def arrived_totals(self, *, wait: bool) -> list[tuple[int, Totals]]:
        return self.metrics.take_arrived(wait=wait)

    def learning_rates(self) -> dict[str, float]:
        return self.rates.by_name()

    def read(self) -> list[Totals]:
        return self.world.values(self.metrics.read())

    def reset(self) -> None:
        self.metrics.reset()

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Totals | None:
        """Loss and accuracy on the validation data, each sample counted once, whatever the number of ranks."""
        self.share_buffers()
        if self.test is None:
            return None
        if self._evaluation is None:
            recorder = None if self.sharded else self.steps.recorder
            self._evaluation = self._new_evaluation(self.test, recorder)
        with self.replicas.with_whole_weights():
            return self._evaluation.evaluate(alive, take)

    def _new_evaluation(self, data: Source, *recorder: Any) -> Evaluation:
        size = self.settings.batch_size
        return Evaluation(self.model, self.world, self.number_format, size, data, self.objective, *recorder)

    def why_no_numbers(self) -> str | None:
        """Why steps make no progress, where a part of the step knows."""
        reasons = (part.why_no_numbers() for part in self.steps.plain.parts)
        return next((reason for reason in reasons if reason is not None), None)

    def bad_samples(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> str | None:
        return self.feed.bad_samples(numbers)

    # The average of the weights

    @property
    def average(self) -> Average | None:
        return next((part for part in self.steps.plain.parts if isinstance(part, Average)), None)

    def keep_average(self, averaging: Averaging) -> None:
        if self.sharded:
            raise BadSettings("mh.EMA and Step(shard=True): the average would be of whole weights. Choose one")
        self.averaging = averaging
        self.steps.build_again()

    def with_averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        if self.average is None:
            return contextlib.nullcontext()
        self.share_buffers()
        return self.average.in_model()

    # Checkpoints

    def save(self) -> Saved | None:
        return checkpoint.save(self)

    def restore(self, saved: Mapping[str, Any], blobs: Mapping[str, bytes], totals: Totals) -> None:
        checkpoint.restore(self, saved, blobs, totals)

    def begin_anew(self) -> None:
        """Between two epochs: other parameters are trained, or the model is another one to a captured step."""
        self._evaluation = None
        self.steps.begin_anew()

    def from_first(self, data: bytes) -> bytes:
        return self.world.value_of_first(data)

    def all_have(self, number: int) -> bool:
        return self.world.all_have(number)

    def share_buffers(self) -> None:
        """Give all ranks the running statistics of the (first) rank with the largest share."""
        if self.settings.step.batch_stats == "per_device":
            largest = self.shares.index(max(self.shares)) if self.shares else 0
            averages = self.average.of_buffers if self.average is not None else []
            self.world.broadcast_([*self.model.buffers(), *averages], largest)


def _check_options(job: Job, world: World) -> None:
    """Refuse options of a step that do not go together."""
    step, several = job.settings.step, world.size > 1
    own_updates = isinstance(job.objective, OwnStep) and makes_updates(job.model)
    if own_updates and several and step.batch_stats == "global":
        raise BadSettings("Step(batch_stats='global') with training_step(batch, optimizers): leave out batch_stats")
    if step.shares == "measured" and ((step.shard and several) or own_updates):
        raise BadSettings("Step(shares='measured') times passes, which change this model: give one number per device")


def _replicas(job: Job, world: World, number_format: NumberFormat) -> Replicas:
    if not job.settings.step.shard or world.size == 1:
        return Replicas(job, world, number_format)
    from manyhands.training.torch.ranks.sharding import Shards  # FSDP2, which few jobs need

    return Shards(job, world, number_format)
