"""What one rank of a job does, from the first step to the last. A job on one device is a world of one rank.

Nothing in a step makes the host wait: shards are on their way before they are needed, losses stay on the device,
and what is shown is what has arrived by itself. The host waits at the end of an epoch and for a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.errors import BadBatch, LossIsNotANumber
from manyhands.training.order import Cursor, Window, epoch_order, windows
from manyhands.training.run_folder import RunFolder
from manyhands.training.torch import batch_norm, clock, feed, graph_step, metrics, randomness, saving, state
from manyhands.training.torch.figures import modes_kept
from manyhands.training.torch.graph_step import GraphStep
from manyhands.training.torch.job import Job, Result, Say, numbers_for
from manyhands.training.torch.metrics import Figures, Metrics
from manyhands.training.torch.reduce import GradientSum
from manyhands.training.torch.sources import Arrays, Batch, Source, Stream
from manyhands.training.torch.step import EagerStep, evaluate
from manyhands.training.torch.world import World

_SHOW_EVERY = 0.2  # seconds between looks at figures that have arrived
_MEASURE_EVERY = 20  # steps between two looks at the speed of the ranks
_NAMED = 8  # samples of a batch that an error lists
_COMPILE_PAYS = 20_000  # steps: compiling takes about half a minute, and saves about a millisecond a step


class Rank:
    """The state of one rank while it works."""

    def __init__(self, job: Job, world: World, say: Say) -> None:
        self.job, self.world, self.say, self.settings = job, world, say, job.settings
        self.result = Result()
        self.cursor = Cursor()
        self.metrics = Metrics(world.device)
        self.shares = self._first_shares()
        self.run = RunFolder.open(job.run) if job.run is not None and world.first else None
        randomness.seed_all(randomness.mixed_seed(job.settings.seed, world.rank))
        self.numbers = numbers_for(job, world.device)
        # Statistics over the whole batch need every rank in every layer, also one without samples.
        self.all_take_part = job.settings.batch_stats == "global" and world.size > 1
        self.model = self._place_model(job.model)
        self.least = 2 if world.size > 1 and not self.all_take_part and _normalises(self.model) else 1
        self.optimizer = (
            job.optimizer if isinstance(job.optimizer, torch.optim.Optimizer) else job.optimizer(self.model)
        )
        state.settle(self.optimizer)
        self.ways = state.optimizer_ways(self.optimizer)
        self.base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.train = feed.resident(job.train, world.device)
        self.test = feed.resident(job.test, world.device) if job.test is not None else None
        saving.restore(self, job.resume)
        self.step = self._make_step()
        self.graph = self._make_graph()
        self._shown = time.perf_counter()

    # Setting up

    def _first_shares(self) -> list[float] | None:
        if self.settings.shares is None or self.settings.shares == "measured":
            return [1 / self.world.size] * self.world.size if self.settings.shares else None
        return [float(share) for share in self.settings.shares]

    def _place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        model = model.to(self.world.device)
        if self.settings.precision == "fp64":
            model = model.double()
        if self.numbers.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.world.broadcast_([*model.parameters(), *model.buffers()])
        if self.all_take_part:
            batch_norm.globalise(model)
        return model if model.training else model.train()  # layers that the caller has frozen stay so

    def _make_step(self) -> EagerStep:
        several = self.world.size > 1
        return EagerStep(
            self.model,
            self.optimizer,
            self.job.objective,
            self.metrics,
            self.world.device,
            self.numbers,
            clip=self.settings.gradient_clip_val,
            accumulate=self.settings.accumulate,
            gradients=GradientSum(self.model.parameters()) if several else None,
            clock=clock.Clock(self.world.device) if self.settings.shares == "measured" and several else None,
        )

    def _make_graph(self) -> GraphStep | None:
        """The fast step, where there can be one; else a note that says why not."""
        settings = self.settings
        reason = graph_step.why_not(self.train, self.optimizer, self.world.device, self.world.size, settings.accumulate)
        if not settings.fast or reason is not None:
            self.result.notes.append(f"plain steps: {reason if settings.fast else 'fast=False'}")
            return None
        assert isinstance(self.train, Arrays)
        steps = settings.max_epochs * (self.train.count // settings.batch_size)
        compiled = settings.compile if settings.compile is not None else steps >= _COMPILE_PAYS
        self.result.notes.append(
            f"the whole step in one CUDA graph, kernels {'compiled' if compiled else 'as they are'}"
        )
        scheduled = self.job.schedule is not None
        return GraphStep(self.step, self.train, settings.batch_size, compiled=compiled, changing_rate=scheduled)

    # Running

    def fit(self) -> Result:
        try:
            return self._fit()
        finally:
            self.close()

    def _fit(self) -> Result:
        self.say_alive()
        while self.cursor.epoch < self.settings.max_epochs:
            whole = self.cursor.sample == 0
            start = time.perf_counter()
            self._train_epoch()
            figures = self._read_figures()
            seconds = time.perf_counter() - start
            self._end_epoch(figures, seconds, whole=whole)
        self.result.shares = self.shares
        return self.result

    def close(self) -> None:
        """Leave model and optimizer as plain ones: they may be the caller's own."""
        if self.step.gradients is not None:
            self.step.gradients.close()
        batch_norm.localise(self.model)
        state.restore_ways(self.optimizer, self.ways, self.base_rates)

    def _train_epoch(self) -> None:
        first = self.cursor.step
        for window, batch in self._batches():
            self._set_rate(window)
            if self.graph is None or not self._graph_step(window):
                self.step(batch() if callable(batch) else batch, window.size, window.step)
            self.cursor = self.cursor.after(window)
            self._look(window)
            every = self.settings.checkpoint_every
            if every and self.cursor.step % every == 0 and self.cursor.step > first:
                saving.save(self)

    def _batches(self) -> Iterator[tuple[Window, Any]]:
        """Every batch of the epoch that is left, with this rank's shard of it."""
        if isinstance(self.train, Stream):
            yield from self._stream_shards(self.train)
            return
        count = self.train.count
        order = self._order(self.train, self.cursor.epoch)
        left = list(windows(self.cursor, count, self.settings.batch_size))
        if self.graph is not None:
            self.graph.begin_epoch(torch.from_numpy(order), self.cursor.sample, self.cursor.step)
            for window in left:  # the graph takes its samples itself; one of another size is fetched when needed
                yield window, lambda window=window: next(feed.shards(self.train, order, [window], self.world))
            return
        chunk = _MEASURE_EVERY if self.settings.shares == "measured" else len(left)
        for begin in range(0, len(left), max(1, chunk)):
            part = left[begin : begin + chunk]
            seed = randomness.mixed_seed(self.settings.seed, self.cursor.step, self.world.rank)
            how: Any = {"seed": seed, "empty": self.all_take_part, "least": self.least}
            shards = feed.shards(self.train, order, part, self.world, self.shares, **how)
            yield from zip(part, shards, strict=True)
            self._measure()

    def _stream_shards(self, stream: Stream) -> Iterator[tuple[Window, Any]]:
        any_given = False
        seed = randomness.mixed_seed(self.settings.seed, self.cursor.epoch)
        how: Any = {"seed": seed, "empty": self.all_take_part, "least": self.least}
        for given in feed.stream_shards(stream, self.cursor, self.world, self.shares, **how):
            any_given = True
            yield given
        if not any_given and not self.cursor.sample:
            raise BadBatch("the loader gave no batch: there is nothing to train on")

    def _order(self, source: Source, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        assert source.count is not None
        return epoch_order(self.settings.seed, epoch, source.count, shuffle=source.shuffle)

    def _graph_step(self, window: Window) -> bool:
        """Make the step in the graph; False where it has to be made in the plain way."""
        assert self.graph is not None
        try:
            return self.graph(window.size)
        except Exception as error:
            self.result.notes.append(
                f"plain steps: the graph could not be made ({type(error).__name__}: {error})"[:300]
            )
            self.graph = None
            torch.cuda.synchronize()
            state.restore_ways(self.optimizer, self.ways, self.base_rates)
            self._set_rate(window)
            return False

    def _set_rate(self, window: Window) -> None:
        if self.job.schedule is None:
            return
        count = self.train.count
        done = window.epoch + (window.start / count if count else 0.0)
        factor = self.job.schedule(done / self.settings.max_epochs)
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor

    def _look(self, window: Window) -> None:
        """Now and then: say how far this rank is, with the figures that have arrived by themselves."""
        now = time.perf_counter()
        if now - self._shown < _SHOW_EVERY:
            return
        self._shown = now
        figures = self.metrics.peek()
        if figures is not None:
            self.check_numbers(figures)
        count = self.train.count
        self.say(
            {
                "kind": "progress",
                "epoch": window.epoch,
                "step": self.cursor.step,
                "batch": self.cursor.batch,
                "batches": -(-count // self.settings.batch_size) if count else None,
                "samples": self.cursor.sample,
                "loss": figures.loss if figures and figures.count else None,
                "accuracy": saving.json_number(figures.accuracy) if figures else None,
            }
        )

    def check_numbers(self, figures: Figures) -> None:
        if figures.bad_step is None or self.settings.on_nan == "continue":
            return
        raise LossIsNotANumber(
            f"{self._bad_step_in_words(figures.bad_step)}. A smaller learning rate or gradient_clip_val may help; "
            "on_nan='continue' goes on regardless"
        )

    def _bad_step_in_words(self, step: int) -> str:
        size, epoch = self.settings.batch_size, self.cursor.epoch
        batch = self.cursor.batch - (self.cursor.step - step)
        which = f"batch {batch} of the loader"
        if not isinstance(self.train, Stream):
            numbers = self._order(self.train, epoch)[batch * size : (batch + 1) * size]
            which = f"samples {', '.join(map(str, numbers[:_NAMED]))}{', ...' if len(numbers) > _NAMED else ''}"
        return f"the loss of step {step} is not a number (epoch {epoch + 1}, {which})"

    def _measure(self) -> None:
        if self.step.clock is None or self.shares is None:
            return
        own = torch.tensor([self.step.clock.per_sample()], dtype=torch.float64)
        seconds = [float(one) for one in self.world.gather(own)]
        self.shares = clock.shares_from(seconds, self.shares)
        self.result.notes = [note for note in self.result.notes if not note.startswith("shares")]
        shown = ", ".join(f"{share:.2f}" for share in self.shares)
        self.result.notes.append(
            f"shares measured: [{shown}]; all together could be {clock.worth(seconds):.2f}x the fastest alone"
        )

    # The end of an epoch

    def _read_figures(self) -> Figures:
        """The epoch's figures over all ranks; waits."""
        figures = self._over_all_ranks(self.metrics.read())
        self.check_numbers(figures)
        if figures.bad_step is not None and self.world.first:
            self.say({"kind": "warning", "text": f"{self._bad_step_in_words(figures.bad_step)}; going on, as asked"})
        return figures

    def _over_all_ranks(self, own: Figures) -> Figures:
        return metrics.together(self.world.gather(metrics.as_tensor(own)))

    def _end_epoch(self, figures: Figures, seconds: float, *, whole: bool) -> None:
        epoch = self.cursor.epoch
        self.share_buffers()
        tested = self._evaluate()
        self.cursor = self.cursor.next_epoch()
        self.metrics.reset()
        row = {
            "epoch": epoch + 1,
            "step": self.cursor.step,
            "train_loss": saving.json_number(figures.loss),
            "train_acc": saving.json_number(figures.accuracy),
            "test_loss": saving.json_number(tested.loss) if tested else None,
            "test_acc": saving.json_number(tested.accuracy) if tested else None,
            "samples": int(figures.count),
            "seconds": seconds,
            "whole": whole,
        }
        self.result.rows.append(row)
        if self.run is not None:
            self.run.append_metrics(row)
        self.say({"kind": "epoch", **row})
        if not self.settings.checkpoint_every or self.cursor.epoch == self.settings.max_epochs:
            saving.save(self)

    def _evaluate(self) -> Figures | None:
        """Loss and accuracy on the test set, each sample counted once, whatever the number of ranks."""
        if self.test is None:
            return None
        self.say_alive()
        sums = Metrics(self.world.device)
        batches: Iterator[Batch | None]
        if isinstance(self.test, Stream):
            batches = (batch for _, batch in feed.stream_shards(self.test, Cursor(), self.world))
        else:
            size = max(self.settings.batch_size, 512)
            all_of_them = list(windows(Cursor(), self.test.count, size))
            batches = feed.shards(self.test, np.arange(self.test.count), all_of_them, self.world)
        with modes_kept(self.model):
            evaluate(self.model, self.job.objective, self._alive(batches), sums, self.numbers)
        self.say_alive()
        return self._over_all_ranks(sums.read())

    def _alive(self, batches: Iterator[Batch | None]) -> Iterator[Batch | None]:
        """The same batches; now and then it is said that this rank is at work."""
        for batch in batches:
            yield batch
            if time.perf_counter() - self._shown > _SHOW_EVERY:
                self.say_alive()

    def say_alive(self) -> None:
        self._shown = time.perf_counter()
        self.say({"kind": "alive", "step": self.cursor.step})

    def share_buffers(self) -> None:
        """Running statistics differ from device to device; those of the (first) largest share count."""
        if self.settings.batch_stats == "per_device":
            largest = self.shares.index(max(self.shares)) if self.shares else 0
            self.world.broadcast_([*self.model.buffers()], largest)


def _normalises(model: torch.nn.Module) -> bool:
    """Whether a layer takes statistics over its shard: of a single sample there are none."""
    return any(isinstance(layer, _BatchNorm) and layer.training for layer in model.modules())
