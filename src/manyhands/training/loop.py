"""Training from the first step to the last, in any framework: a learner makes the steps, the loop does the rest.

The loop drives epochs; its parts know where the job stands (:mod:`.data.order`), when it ends (:mod:`.stopping`),
what is reported to callbacks (:mod:`.callbacks.events`), what is saved (:mod:`.checkpoints.saving`) and how the
learning rate changes (:mod:`.schedules`).

Nothing in a step makes the host wait: losses stay on the devices, and only sums that have already arrived are shown.
The host waits at the end of an epoch and for a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from manyhands.amounts import count_of
from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import NO_CALLBACKS, CallbackPlan
from manyhands.training.callbacks.events import Reporter
from manyhands.training.checkpoints.run_folder import RunPlan
from manyhands.training.checkpoints.saving import Saver
from manyhands.training.data import loader_batches
from manyhands.training.data.order import Cursor, Position, Window
from manyhands.training.evaluation.metrics import Metrics, evaluate_with_metrics
from manyhands.training.learner import Learner, Say, share
from manyhands.training.options import ENDLESS, Settings
from manyhands.training.result import Result
from manyhands.training.running_sums import NanCheck, Totals, add, means_by_name, means_of_logged, or_none
from manyhands.training.schedules import Schedule, ScheduleOfJob
from manyhands.training.stopping import Ending, StopNow

# Called after each step of any job of this process: the auditor counts by them.
step_listeners: list[Callable[[], None]] = []


class Loop:
    """One process's view of a job while it runs."""

    def __init__(
        self,
        learner: Learner,
        settings: Settings,
        say: Say,
        *,
        schedule: Schedule | None = None,
        run: RunPlan | None = None,
        resume: Path | None = None,
        callbacks: CallbackPlan = NO_CALLBACKS,
        metrics: Metrics | None = None,
        lend_model: Callable[[Callable[[Any], None]], None] | None = None,
    ) -> None:
        """``resume`` is a checkpoint, or a folder of them, that the first process can read.

        ``lend_model`` calls a function with the model, and gives all processes what has changed; None: it is not lent.
        """
        self.learner, self.settings, self._lend_model = learner, settings, lend_model
        self.metrics = metrics or Metrics()
        self.result = Result()
        self.position = Position(learner.data, settings)
        self.ending = Ending(learner, settings.limits)
        self.report = Reporter(learner, say, callbacks, self.position, self.ending)
        self.schedule = ScheduleOfJob(schedule, learner, self.position)
        self.nan_check = NanCheck(learner, self.position)
        self.saver = Saver(learner, self.position, self.ending, self.report, self.nan_check, run)
        self._before: dict[str, Any] | None = None  # the state of the checkpoint that the job resumes
        try:
            self._begin(resume)
        except BaseException:
            self._close()
            raise

    @property
    def cursor(self) -> Cursor:
        return self.position.cursor

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows things."""
        return self.learner.rank == 0

    def _begin(self, resume: Path | None) -> None:
        """Restore. The run begins with the first step: a job that is refused does not change its folder."""
        if self.report.plan.gets_model and self._lend_model is None:
            raise BadSettings(
                "a callback has on_model(training, model), which PyTorch's trainer alone calls, and not with "
                "Step(shard=True). Give run= and use on_checkpoint(training, path): mh.load_weights(another_model, "
                "path) gives you the weights, to look at"
            )
        self.saver.lock()
        if self.report.plan.average is not None:
            self.learner.keep_average(self.report.plan.average)
        self._before = self.saver.restore(resume)
        self.schedule.check(self.metrics.names)
        self.result.rows = self.saver.rows()
        if self._before is not None:
            self.result.rows = share(self.learner, self.result.rows)

    def _close(self) -> None:
        try:
            self.learner.close()
        finally:
            self.saver.close()

    def fit(self) -> Result:
        try:
            self.report.alive()
            if self.is_over:
                self.learner.notes.append("this run had already finished: nothing was trained")
            else:
                self._check_repeats()
            self.report.begin(self.result.rows, resumed=self._before is not None)
            if self._before is not None and self.first:
                self.saver.announce(self._before, is_over=self.is_over)
            while (ended := self._why_ended()) is None:
                self.report.epoch_start()
                self._train_epoch()
            return self._finish(ended)
        finally:
            self._close()

    def _finish(self, ended: str) -> Result:
        result, cursor = self.result, self.cursor
        result.ended = ended
        if ended != "max_epochs":
            where = f"step {cursor.step}" if cursor.sample else f"epoch {cursor.epoch}"
            result.signal = self.ending.signal
            result.stopped = result.signal or (None if self.ending.stop is None else self.ending.stop["stop"])
            if result.stopped is not None:
                self.learner.notes.append(f"stopped after {where}: {result.stopped}")
            self.report.note(f"ended after {where}: {ended}")
        result.notes, result.shares, result.steps = self.learner.notes, self.learner.shares, cursor.step
        result.unsaved = self.saver.list_unsaved()
        return result

    # When it ends

    @property
    def is_over(self) -> bool:
        """Whether a limit is reached, and the row of that end is there."""
        step = self.cursor.step
        if self.cursor.epoch >= self.settings.max_epochs:
            return True
        return self.ending.is_reached(step) and self.position.last_row == step

    def _why_ended(self) -> str | None:
        """Why the training ends here, for ``Result.ended``; None if it continues."""
        if self.ending.reason is not None:
            return self.ending.reason
        if self.is_over:
            return "max_epochs" if self.cursor.epoch >= self.settings.max_epochs else self.ending.reached
        is_endless = self.settings.max_epochs == ENDLESS
        if self.cursor.epoch and is_endless and loader_batches.is_used_up(self.position.loader):
            self.learner.notes.append(
                f"the data ended after {count_of(self.cursor.step, 'step')}, before a limit was reached"
            )
            return "end of the data"
        return None

    # Steps

    def _train_epoch(self) -> None:
        """Train to the end of the epoch, or of the job."""
        self.position.begin_epoch()
        with contextlib.suppress(StopNow):
            over = self._make_steps()
            if not self.ending.signal and (over or self.ending.reached or self.ending.stop is not None):
                self._end_epoch(over=over)
        if self.ending.signal:
            self.saver.save_once()

    def _make_steps(self) -> bool:
        """Make the remaining steps of the epoch; False where the job ends before the epoch."""
        first, window, every = self.cursor.step, None, self.settings.checkpoints.every
        with contextlib.closing(self._batches_left()) as batches:
            for window, batch in batches:
                if self.ending.reached:  # no step is left, only the evaluation of the end
                    break
                if self.position.evaluation_is_due:
                    self.saver.begin()
                    self._add_row(self._read_sums(), evaluates=True)
                    self.saver.save_once(self.report.take_wanted_folders())
                    if self.ending.stop is not None:
                        return False
                self._step(window, batch)
                if every and self.cursor.step % every == 0 and self.cursor.step > first:
                    self.saver.save_once()
                if self.ending.check(self.cursor.step):
                    break
            else:
                return True
        if window is not None:
            loader_batches.check_agreed(window, self.learner.all_have)
        return self.position.is_end_of_epoch

    def _step(self, window: Window, batch: Any) -> None:
        self.learner.step(window, batch, self.schedule.factor())
        for listener in step_listeners:
            listener()
        self.saver.begin()
        self.position.cursor = self.cursor.after(window)
        self.report.step()
        if self.report.is_due:
            sums = self.learner.peek()
            if sums is not None:
                self.nan_check.check(sums)
            self.report.progress(sums)

    def _batches_left(self) -> Generator[tuple[Window, Any]]:
        limits, at = self.settings.limits, self.cursor
        if limits.overfit_batches is not None:
            at = dataclasses.replace(at, epoch=0)  # the samples of the first epoch, in its order
        pairs = self.learner.batches(at)
        if limits.batches is not None:
            pairs = itertools.islice(pairs, max(0, limits.batches - at.batch))
        return loader_batches.check_agreement(pairs, self.learner.all_have)

    def _check_repeats(self) -> None:
        """Warn if a job resumes at the start of an epoch and its loader gives another order than before."""
        before, loader = self.cursor.first_batch, self.position.loader
        if self.cursor.batch or not self.cursor.epoch or before is None or isinstance(loader, Iterator):
            return
        if self.settings.limits.overfit_batches is not None:
            return
        windows = (window for window, _ in self.learner.batches(Cursor(self.cursor.epoch - 1)))
        first = next(windows, None)
        windows.close()
        if (first is None or first.digest != before) and self.first:
            self.report.warn(loader_batches.not_repeated_epoch(self.cursor.epoch))

    # Rows of metrics

    def _end_epoch(self, *, over: bool) -> None:
        """The row and the checkpoint at the end of an epoch, or of a job that ends within one (not ``over``)."""
        sums = self._read_sums()
        self.saver.begin()
        epoch, step = self.cursor.epoch, self.cursor.step
        if step > self.position.last_row:
            every, unit = self.settings.limits.evaluation
            due = over and (epoch + 1) % every == 0 if unit == "epochs" else self.position.evaluation_is_due
            is_last = over and epoch + 1 >= self.settings.max_epochs
            is_last = is_last or self.ending.is_reached(step) or self.ending.stop is not None
            # Schedulers do not see a row that only the end brings: a job with larger limits would not have it.
            counts = due or not is_last
            self._add_row(sums, evaluates=due or is_last, ends_epoch=True, over=over, counts=counts)
        if over:
            if self.report.plan.gets_model and self._lend_model is not None:
                self._lend_model(self.report.model)
            self.position.next_epoch()
            self.schedule.after_epoch()
        is_regular = self.is_over or self.ending.stop is not None or not self.settings.checkpoints.every
        self.saver.save_once([*self.report.take_wanted_folders(), *(["checkpoints"] if is_regular else [])])

    def _read_sums(self) -> Totals:
        """The sums since the row before, over all processes; waits."""
        sums = add(self.learner.read())
        self.report.report_steps(wait=True)
        self.nan_check.check(sums)
        if sums.bad_step is not None and self.first:
            self.report.warn(f"{self.nan_check.describe(sums.bad_step)}; continuing, as requested")
        return sums

    def _add_row(
        self, sums: Totals, *, evaluates: bool, ends_epoch: bool = False, over: bool = False, counts: bool = True
    ) -> None:
        """Add a row with the metrics since the row before; ``counts``: schedulers see it."""
        seconds, cursor = self.position.seconds_of_row, self.cursor
        self.report.alive()
        tested, metrics = self._evaluate(cursor.epoch + 1) if evaluates else (None, {})
        self.report.alive()
        self.learner.reset()
        logged = means_of_logged(sums) | (means_of_logged(tested) if tested else {})
        row = {
            "epoch": cursor.epoch + 1,
            "step": cursor.step,
            "train_loss": or_none(sums.loss),
            "train_acc": or_none(sums.accuracy),
            "val_loss": or_none(tested.loss) if tested else None,
            "val_acc": or_none(tested.accuracy) if tested else None,
            **metrics,
            "samples": int(sums.count),
            "seconds": seconds,
            "whole": over and self.position.last_row <= cursor.step - cursor.batch,  # no other row in this epoch
            **self.report.rates(),
        }
        row |= {name: or_none(value) for name, value in logged.items() if row.get(name) is None}
        self.position.last_row = cursor.step
        self.position.begin_row()
        if counts:
            self.schedule.after_row(row, evaluated=tested is not None)
        self.result.rows.append(row)
        if self.saver.run is not None and (warning := self.saver.run.add_row(row)) is not None:
            self.report.warn(warning)
        self.report.row(row, sums, ends_epoch=ends_epoch)

    def _evaluate(self, epoch: int) -> tuple[Totals | None, dict[str, Any]]:
        """The sums over the validation data, and the user's metrics by the names that they have in a row."""
        with self.learner.with_averaged_weights():
            tested, values = evaluate_with_metrics(self.learner, self.metrics, self._after_evaluated_batch)
        metrics = {f"val_{name}": value for name, value in values.items()}
        if tested is not None:
            known = {name: value for name, value in metrics.items() if value is not None}
            self.report.evaluation({**means_by_name(tested, "val"), **known}, epoch)
        return tested, metrics

    def _after_evaluated_batch(self) -> None:
        self.ending.interrupt_evaluation()
        if self.report.is_due:
            self.report.alive()
