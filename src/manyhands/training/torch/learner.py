"""PyTorch's learner: what one rank of a job does. A job on one device is a world of one rank.

Nothing in a step makes the host wait: shards are on their way before they are needed and losses stay on the device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from manyhands.errors import BadSettings, ManyhandsError
from manyhands.training.callbacks.callback import Averaging
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.data.order import Cursor, Window, epoch_order, windows
from manyhands.training.data.sources import bad_numbers
from manyhands.training.learner import Saved, Say, Take, named_rates
from manyhands.training.loop import Loop
from manyhands.training.running_sums import Figures
from manyhands.training.torch.data import feed
from manyhands.training.torch.data.batches import Shard, tensors_in
from manyhands.training.torch.data.drawn_samples import generator_of
from manyhands.training.torch.data.sources import Arrays, Samples, Source, Stream
from manyhands.training.torch.evaluation import Evaluation
from manyhands.training.torch.fast import capturable, capture_stream
from manyhands.training.torch.fast.build import fast_step
from manyhands.training.torch.fast.captured_step import GraphStep
from manyhands.training.torch.fast.norms.choice import normalises_batches
from manyhands.training.torch.job import Job, number_format_for
from manyhands.training.torch.objective import OwnStep, makes_updates, placed
from manyhands.training.torch.preflight import precision
from manyhands.training.torch.ranks import global_batch_norm, measured_shares, replicas, sharding
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.schedulers import schedulers_of
from manyhands.training.torch.state import checkpoint, job_state, randomness
from manyhands.training.torch.state.module_state import ModuleState
from manyhands.training.torch.step import activation_checkpoints, running_sums
from manyhands.training.torch.step.average import Average
from manyhands.training.torch.step.build import build_step
from manyhands.training.torch.step.eager import EagerStep
from manyhands.training.torch.step.loss_scale import LossScale
from manyhands.training.torch.step.running_sums import RunningSums
from manyhands.training.torch.step.several_optimizers import Several


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
    )
    return loop, rank


class Rank:
    """The state of one rank while it works; a :class:`~manyhands.training.learner.Learner`."""

    framework = "torch"
    keeps_precision = True  # of a checkpoint, with precision="auto"

    def __init__(self, job: Job, world: World) -> None:
        self.job, self.world, self.settings = job, world, job.settings
        self.rank, self.size = world.rank, world.size
        self.notes: list[str] = [*job.notes]
        self._precision_note = ""  # of the notes, the one that a later one replaces
        self.module_state = ModuleState(job.model)
        self.metrics = RunningSums(world.device)
        self.shares = job.settings.fixed_shares
        randomness.seed_all(randomness.mixed_seed(job.settings.seed, world.rank))
        self.number_format = number_format_for(job, world.device)
        # Statistics over the whole batch need every rank in every layer, also one without samples.
        self._global_stats = job.settings.step.batch_stats == "global" and world.size > 1
        self.sharded = job.settings.step.shard and world.size > 1
        self.makes_updates = isinstance(job.objective, OwnStep) and makes_updates(job.model)
        if self.makes_updates and self._global_stats:
            raise BadSettings(
                "Step(batch_stats='global') with training_step(batch, optimizers): a device without samples makes the "
                "same updates with a sample that it has had before, and statistics over all devices would count it. "
                "Leave out batch_stats"
            )
        if job.settings.step.shares == "measured" and (self.sharded or self.makes_updates):
            raise BadSettings(
                "Step(shares='measured') times passes of a copy of the model, and a sharded model, or one that makes "
                "its updates itself, has none that changes nothing: give one number per device"
            )
        several = world.size > 1
        gathers = job.objective.rows is not None
        self.all_take_part = self._global_stats or self.sharded or (several and (self.makes_updates or gathers))
        self.model = self._shard_model(job) if self.sharded else self._place_model(job.model)
        self.least = 2 if world.size > 1 and not self._global_stats and normalises_batches(self.model) else 1
        statistics, pick = job.settings.step.batch_stats, job.settings.step.activation_checkpointing
        self.checkpointed = activation_checkpoints.of(self.model, pick, statistics=statistics)
        self.objective = placed(job.objective, world.device, self.number_format.dtype)
        configured = job.make_optimizer(self.model)
        self.optimizer = optimizer = configured.optimizer
        job_state.settle(optimizer)
        self._run_options = job_state.run_options(optimizer)
        self.base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.optimizer_name = optimizer.name if isinstance(optimizer, Several) else type(optimizer).__name__
        self.optimizer_options = job_state.optimizer_options(self.optimizer)
        self.data = feed.resident(job.train, world.device)
        self.test = feed.resident(job.test, world.device) if job.test is not None else None
        self.average: Average | None = None
        self.scale = LossScale(world.device) if job.settings.precision == "fp16" else None
        self.plain_step = build_step(self)
        self.graph: GraphStep | None = None
        self.half_before: bool | None = None  # whether a resumed job computed in bfloat16
        self._begun = False
        self.scheduler = schedulers_of(job.schedule, configured) if job.purpose == "fit" else None
        self._first_step = 0  # of the epoch
        self._factor = 1.0  # of the learning rates
        self._unproven = False  # no step has shown yet that the model can compute in bfloat16

    def _place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        model = model.to(self.world.device)
        if self.settings.precision == "fp64":
            model = model.double()
        if self.number_format.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.world.broadcast_([*model.parameters(), *model.buffers()])
        if self._global_stats:
            global_batch_norm.use_global_statistics(model)
        return model if model.training else model.train()  # layers that the caller has frozen stay so

    def _shard_model(self, job: Job) -> torch.nn.Module:
        """A sharded copy of the model."""
        self.number_format.channels_last = False  # FSDP2 divides contiguous memory only
        model = sharding.sharded(job.model, self.world, torch.float64 if self.settings.precision == "fp64" else None)
        self.module_state = ModuleState(model)
        return model

    def update_caller_model(self) -> None:
        """After sharded training, put the whole weights into the caller's model; all ranks take part."""
        if self.sharded:
            sharding.update_caller_model(self.model, self.job.model)
            self.model = self.job.model

    def _choose_precision(self) -> None:
        """Choose the precision where it is "auto": the same on all ranks, and a resumed job keeps its own."""
        if self.settings.precision != "auto":
            return
        if self.number_format.dtype is torch.float64:
            self._note_precision(precision.Choice("fp64", precision.CONTINUED))
            return
        choice = precision.choose(self.job, self.model, self.objective, self.world, self.half_before)
        self._note_precision(choice)
        self._unproven = choice.bf16 and self.world.size == 1
        if choice.bf16:
            number_format = precision.bf16_format(self.model)
            self.number_format.autocast, self.number_format.channels_last = (
                number_format.autocast,
                number_format.channels_last,
            )
            if number_format.channels_last:
                self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                job_state.settle(self.optimizer)

    def _note_precision(self, choice: precision.Choice) -> None:
        self.notes = [str(choice), *(note for note in self.notes if note != self._precision_note)]
        self._precision_note = str(choice)
        if self.job.run is not None and self.world.first:
            RunFolder(self.job.run.path).record_precision(choice.precision, choice.why)

    def _begin(self) -> None:
        """Prepare the first step; called when the optimizer has the state of its checkpoint."""
        settings, device, size = self.settings, self.world.device, self.world.size
        reason = capturable.why_not(self.data, self.optimizer, device, size, settings.step.accumulate)
        reason = reason or self.objective.why_not_captured(self.model)
        reason = reason or (self.scheduler.why_not_captured if self.scheduler is not None else None)
        reason = "optimize='off'" if settings.step.optimize == "off" else reason
        # Trials run on the stream of the capture: cuBLAS keeps memory for every stream that it has seen.
        with capture_stream.on(capture_stream.stream_of(device) if reason is None else None, device):
            self._choose_precision()
        if self.average is not None:
            self.average.settle()
        if reason is None and isinstance(self.data, Arrays):
            self.graph = self._fast_step(self.data)
            kernels = {True: ", kernels compiled", False: ", kernels not compiled", None: ""}  # None: decided later
            self.notes.append(f"the whole step in one CUDA graph{kernels[self.graph.compiled]}")
        else:
            self.notes.append(f"plain steps: {reason}")
        self._count_good_steps()
        generator = generator_of(self.data.dataset) if isinstance(self.data, Samples) else None
        if generator is not None:
            self.notes.append(
                f"{generator} is a random generator of the dataset: a resumed job does not restore it. "
                "Draw from torch, numpy.random or random, which are seeded for every sample"
            )

    def _fast_step(self, data: Arrays) -> GraphStep:
        assert isinstance(self.plain_step, EagerStep)
        changing = self.job.schedule is not None or self.scheduler is not None
        return fast_step(self.plain_step, data, self.settings, changing_rate=changing, checkpointed=self.checkpointed)

    def close(self) -> None:
        """Undo what the job did to the model and the optimizer, and note how the fast step ran."""
        if self.graph is not None:
            self.notes += self.graph.notes()
            if self.job.run is not None:
                with contextlib.suppress(OSError):  # no disk space: not worth losing a run for
                    RunFolder(self.job.run.path).write_step(self.graph.explain())
        if self.average is not None:
            self.average.put_into_model()
        self.notes += [] if self.scale is None else [self.scale.note()]
        self.plain_step.close()
        global_batch_norm.use_local_statistics(self.model)
        if self.checkpointed is not None:
            self.checkpointed.close()
        job_state.restore_run_options(self.optimizer, self._run_options, self.base_rates)
        if self.scheduler is not None:
            self.scheduler.close()

    # Steps

    def batches(self, cursor: Cursor) -> Iterator[tuple[Window, Any]]:
        """The remaining batches of the epoch, with this rank's shard of each."""
        self._first_step = cursor.step - cursor.batch
        if not self._begun:
            self._begun = True
            self._begin()
        if isinstance(self.data, Stream):
            yield from self._stream_shards(self.data, cursor)
            return
        count = self.data.count
        order = self._order(self.data, cursor.epoch)
        left = list(windows(cursor, count, self.settings.batch_size))
        if self.graph is not None:
            self.graph.begin_epoch(torch.from_numpy(order), cursor.sample, cursor.step)
            for window in left:  # the graph reads its samples itself; a plain step after it fetches them
                yield window, lambda window=window: next(feed.shards(self.data, order, [window], self.world))
            return
        how: dict[str, Any] = {"seed": self.settings.seed, **self._cutting}
        if self._measures_shares and left:
            self._measure_shares(next(feed.shards(self.data, order, left[:1], self.world, **how)))
        yield from zip(left, feed.shards(self.data, order, left, self.world, self.shares, **how), strict=True)

    @property
    def _cutting(self) -> dict[str, Any]:
        """How a batch is divided."""
        return {"empty": self.all_take_part, "least": self.least, "accumulate": self.settings.step.accumulate}

    def _stream_shards(self, stream: Stream, cursor: Cursor) -> Iterator[tuple[Window, Any]]:
        seed = randomness.mixed_seed(self.settings.seed, cursor.epoch)
        batches: Iterator[tuple[Window, Any]] = feed.stream_windows(stream, cursor, seed=seed)
        first = next(batches, None) if self._measures_shares else None
        if first is not None:
            self._measure_shares(next(feed.stream_shards([first], self.world, **self._cutting))[1])
            batches = itertools.chain([first], batches)
        yield from feed.stream_shards(batches, self.world, self.shares, **self._cutting)

    def _order(self, source: Source, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        assert source.count is not None
        return epoch_order(self.settings.seed, epoch, source.count, shuffle=source.shuffle)

    def step(self, window: Window, batch: Any, factor: float | None) -> None:
        self._step_in_any_precision(window, batch, factor)
        if self.scheduler is not None:
            self.scheduler.after_step()

    def _step_in_any_precision(self, window: Window, batch: Any, factor: float | None) -> None:
        """Make one step. If bfloat16 was our choice and its first step fails, make it again in float32."""
        if not self._unproven:
            self._step(window, batch, factor)
            return
        self._unproven = False
        before, had_graph, notes = precision.BeforeStep(self.plain_step), self.graph is not None, list(self.notes)
        try:
            self._step(window, batch, factor)
        except (ManyhandsError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not before.put_back():
                raise
            choice = precision.refused(self.model, error)
        else:
            return
        self.notes, self.number_format.autocast = notes, None
        if had_graph and isinstance(self.data, Arrays):
            self.graph = self._fast_step(self.data)
            order = torch.from_numpy(self._order(self.data, window.epoch))
            self.graph.begin_epoch(order, window.start, window.step)
        self._step(window, batch, factor)
        self._note_precision(choice)

    def _step(self, window: Window, batch: Any, factor: float | None) -> None:
        """Make one step: a replay of the graph, or a plain step."""
        self._set_rate(factor)
        if self.graph is None or not self._graph_step(window, factor):
            shard = batch() if callable(batch) else batch
            self.plain_step(shard, window.size, window.step, window.step - self._first_step)

    def _graph_step(self, window: Window, factor: float | None) -> bool:
        """Make the step in the graph; False where this step and all later ones have to be plain."""
        assert self.graph is not None
        if self.graph(window.size):
            return True
        self.notes.append(f"plain steps: {self.graph.ended}")
        self.graph = None
        torch.cuda.synchronize(self.world.device)
        job_state.restore_run_options(self.optimizer, self._run_options, self.base_rates)
        self._count_good_steps()
        self._set_rate(factor)
        return False

    def _count_good_steps(self) -> None:
        """On a GPU, where updates may be taken back, count the steps on the device: a skipped one does not count."""
        if self.plain_step.undo is not None and self.world.device.type == "cuda":
            capturable.count_on_device(self.optimizer)

    def _set_rate(self, factor: float | None) -> None:
        if self.scheduler is not None:
            self.scheduler.apply()
        if factor is None:
            return
        self._factor = factor
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

    @property
    def _measures_shares(self) -> bool:
        """Whether shares are to be measured, before the first step; a resumed job on the same devices has them."""
        return self.settings.step.shares == "measured" and self.size > 1 and self.shares is None

    def _measure_shares(self, shard: Shard | None) -> None:
        self.shares, note = measured_shares.measured(self.model, self.objective, shard, self.number_format, self.world)
        self.notes.append(note)

    # Figures

    def peek(self) -> Figures | None:
        return self.metrics.peek()

    def keep_average(self, averaging: Averaging) -> None:
        if self.sharded:
            raise BadSettings(
                "mh.EMA and Step(shard=True): the average would be of whole weights. Leave out one of them"
            )
        self.average = self.plain_step.average = Average(self.model, averaging)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        if self.average is None:
            return contextlib.nullcontext()
        self._share_buffers()
        return self.average.in_model()

    def send_figures(self, step: int) -> None:
        self.metrics.send(step, self.world)

    def arrived_figures(self, *, wait: bool) -> list[tuple[int, Figures]]:
        return self.metrics.arrived(wait=wait)

    def learning_rates(self) -> dict[str, float]:
        """The rates as the host set them: a captured step keeps its own on the device."""
        if self.scheduler is not None:
            return named_rates(self.scheduler.rates(self.optimizer))
        return named_rates([base * self._factor for base in self.base_rates])

    def read(self) -> list[Figures]:
        sums = running_sums.as_tensor(self.metrics.read())
        return [running_sums.from_tensor(figures) for figures in self.world.gather(sums)]

    def reset(self) -> None:
        self.metrics.reset()

    def evaluate(self, alive: Callable[[], None], take: Take | None = None) -> Figures | None:
        """Loss and accuracy on the validation data, each sample counted once, whatever the number of ranks."""
        self._share_buffers()
        if self.test is None:
            return None
        size = self.settings.batch_size
        evaluation = Evaluation(self.model, self.world, self.number_format, size, self.test, self.objective)
        with sharding.gathered(self.model) if self.sharded else contextlib.nullcontext():
            return evaluation.evaluate(alive, take)

    def why_no_numbers(self) -> str | None:
        """Why steps make no progress, where the loss scale says so."""
        return None if self.scale is None else self.scale.why_collapsed()

    def bad_samples(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> str | None:
        """Which of these samples of a dataset have NaN or infinity, in words."""
        if not isinstance(self.data, Samples):
            return None
        parts = [part for part in tensors_in(self.data.pick(numbers)) if part.shape[:1] == numbers.shape]
        return bad_numbers(parts, numbers.tolist())

    # Checkpoints

    def save(self) -> Saved | None:
        if self.size > 1 and not self.sharded:
            replicas.check(self.model, self.world)
        self._share_buffers()
        return checkpoint.save(self)

    def restore(self, saved: Mapping[str, Any], blobs: Mapping[str, bytes], figures: Figures) -> None:
        checkpoint.restore(self, saved, blobs, figures)

    def become_double(self) -> None:
        """Compute in float64, as the job of the checkpoint did; called before its state is restored."""
        self.number_format.dtype = torch.float64
        self.model.double()
        self.objective = placed(self.job.objective, self.world.device, self.number_format.dtype)
        job_state.settle(self.optimizer)
        self.plain_step.close()
        self.plain_step = build_step(self)

    def from_first(self, data: bytes) -> bytes:
        return self.world.bytes_from_first(data)

    def all_have(self, number: int) -> bool:
        return self.world.all_have(number)

    def _share_buffers(self) -> None:
        """Give all ranks the running statistics of the (first) rank with the largest share."""
        if self.settings.step.batch_stats == "per_device":
            largest = self.shares.index(max(self.shares)) if self.shares else 0
            averages = self.average.of_buffers if self.average is not None else []
            self.world.broadcast_([*self.model.buffers(), *averages], largest)
