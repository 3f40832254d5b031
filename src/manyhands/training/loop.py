"""Training from the first step to the last, in any framework: a learner makes the steps, the loop does the rest.

Nothing in a step makes the host wait: losses stay on the devices, and only figures that have already arrived are shown.
The host waits at the end of an epoch and for a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from manyhands.amounts import counted
from manyhands.training import running_sums, schedules
from manyhands.training.callbacks.callback import NO_CALLBACKS, CallbackPlan
from manyhands.training.callbacks.dispatcher import named
from manyhands.training.callbacks.reporter import Reporter
from manyhands.training.checkpoints import saving
from manyhands.training.checkpoints.run_folder import RunFolder, RunPlan
from manyhands.training.data import loader_batches
from manyhands.training.data.order import Cursor, Window
from manyhands.training.evaluation.metrics import Metrics, evaluate_with_metrics
from manyhands.training.learner import Data, Learner, Say
from manyhands.training.result import Result
from manyhands.training.running_sums import Figures, or_none, together
from manyhands.training.schedules import Schedule
from manyhands.training.settings import Settings
from manyhands.training.stopping import ENDLESS, Ending, StopNow

_SHOW_EVERY = 0.2  # seconds between looks at figures that have arrived

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
    ) -> None:
        """``resume`` is a checkpoint, or a folder of them, that the first process can read."""
        self.learner, self.settings, self.say, self.schedule = learner, settings, say, schedule
        self.metrics = metrics or Metrics()
        self.result = Result()
        self.report = Reporter(self, callbacks)
        self.cursor = Cursor()
        self.batches_before: int | None = None  # the batches of a loader in the epoch before
        self.last_row = 0  # the step of the newest row of figures
        # From the checkpoint: where its job ended and was evaluated; None: it did not end, {}: not known.
        self.end_before: dict[str, Any] | None = {}
        self._owes_evaluation = False  # the job before ended here, but was not evaluated
        self.ending = Ending(learner, settings.limits)
        self.keeps_checkpoints = run is not None
        self.run = RunFolder(run.path) if run is not None and self.first else None
        self._begun: tuple[Cursor, int] | None = None  # cursor and last row at the start; None after the first step
        self._saved: tuple[Cursor, int] | None = None  # cursor and last row of the newest checkpoint
        self._row_began = time.perf_counter()
        self.seconds_before = 0.0  # of a row that the job before had begun
        self._shown = time.perf_counter()
        self._evaluated = 0  # batches of this evaluation
        try:
            self._begin(run, resume)
        except BaseException:
            self._close()
            raise

    def _begin(self, run: RunPlan | None, resume: Path | None) -> None:
        """Restore, and only then begin the run: a job that is refused does not change its folder."""
        if self.run is not None and self.run.path.is_dir():
            self.run.lock()  # also for reading, so that no other job writes meanwhile
        if self.report.plan.average is not None:
            self.learner.keep_average(self.report.plan.average)
        before = saving.restore(self, resume)
        self.report.resumed = before is not None
        self._settle_end(same_run=run is not None and run.resumes)
        if before is not None and self.first:
            saving.announce(self, before, run.announced if run is not None else ())
        schedules.check(self.schedule, self)
        if self.run is not None and run is not None:
            note = self.run.begin(run, self.settings.as_dict())
            if note is not None:
                self.say({"kind": "warning", "text": note})
            # Only a job that is at its end counts the row of that end (_add_last_row).
            self.result.rows = saving.rows_before(self.run, self.cursor.step if self.is_over else self.last_row)
            self._begun = self.cursor, self.last_row
        if before is not None:
            saving.share_rows(self)

    def _settle_end(self, *, same_run: bool) -> None:
        """If the job before had reached this job's end: find out whether that end must still be evaluated.

        It must if that job was killed during the evaluation, or if its figures are in another run.
        """
        end = self.end_before
        if end is None or (end and not same_run):
            self._owes_evaluation = self.cursor.step > self.last_row
        elif end.get("epoch", 0) > self.cursor.epoch and end["epoch"] >= self.settings.max_epochs:
            self.cursor = self.cursor.next_epoch()

    def _commit(self) -> None:
        """Take over the existing run, now that the first step (or an evaluation) has succeeded."""
        if self.run is not None and self._begun is not None:
            self.run.commit()
            saving.rewind(self.run, *self._begun)
            self._begun = None

    def _close(self) -> None:
        try:
            self.learner.close()
        finally:
            if self.run is not None:
                self.run.release()

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows things."""
        return self.learner.rank == 0

    def fit(self) -> Result:
        try:
            self.report_alive()
            if self.is_over:
                self.learner.notes.append("this run had already finished: nothing was trained, its figures are shown")
                if self.run is not None:
                    self.run.restore_config()
            else:
                self._check_repeats()
            self.report.begin()
            while (ended := self._ended()) is None:
                self.report.epoch_start()
                self._train_epoch()
            self._say_end(ended)
            self.result.notes = self.learner.notes
            self.result.shares = self.learner.shares
            self.result.steps = self.cursor.step
            self.result.unsaved = self._unsaved()
            return self.result
        except BaseException:
            if self.run is not None and self._begun is not None:
                self.run.withdraw()
            raise
        finally:
            self._close()

    def _say_end(self, ended: str) -> None:
        """Record why the training ends; a note reports an end before the last epoch."""
        self.result.ended = ended
        if ended == "max_epochs":
            return
        self.result.signal, self.result.stopped = self.ending.signal, self.ending.signal or self.report.stop
        where = f"step {self.cursor.step}" if self.cursor.sample else f"epoch {self.cursor.epoch}"
        if self.result.stopped is not None:
            self.learner.notes.append(f"stopped after {where}: {self.result.stopped}")
        self.say({"kind": "note", "text": f"ended after {where}: {ended}"})

    def _ended(self) -> str | None:
        """Why the training ends here, for ``Result.ended``; None if it continues."""
        if self.ending.signal is not None:
            return f"signal {self.ending.signal}"
        if self.report.stop is not None:
            return f"{self.report.stopped_by}: {self.report.stop}"
        if self.is_over:
            return "max_epochs" if self.cursor.epoch >= self.settings.max_epochs else self.ending.reached
        endless = self.settings.max_epochs == ENDLESS
        if self.cursor.epoch and endless and loader_batches.is_used_up(self._loader):
            self.learner.notes.append(
                f"the data ended after {counted(self.cursor.step, 'step')}, before a limit was reached"
            )
            return "end of the data"
        return None

    @property
    def is_over(self) -> bool:
        """Whether a limit is reached and no evaluation of that end is missing."""
        if self.cursor.epoch >= self.settings.max_epochs:
            return True
        return self.ending.is_reached(self.cursor.step) and not self._owes_evaluation

    def _train_epoch(self) -> None:
        """Train to the end of the epoch, or of the job."""
        self._row_began = time.perf_counter() - (self.seconds_before if self.cursor.sample else 0.0)
        with contextlib.suppress(StopNow):
            over = self._make_steps()
            self.report.take_stop(self.ending.stop or {})
            if not self.ending.signal and (over or self.ending.reached or self.report.stop is not None):
                self._end_epoch(over=over)
        if self.ending.signal:
            self.save_once()

    def _make_steps(self) -> bool:
        """Make the remaining steps of the epoch; False where the job ends before the epoch."""
        first, window, most = self.cursor.step, None, self.settings.limits.batches
        with contextlib.closing(self._batches_left()) as batches:
            for window, batch in batches:
                if self.ending.reached:  # no step is left, only the evaluation of the end
                    break
                if self._evaluation_is_due():
                    self._commit()
                    self._add_row(self._read_figures(), evaluates=True)
                    saving.save(self, self.report.take_wanted_folders())
                    if self.report.stop is not None:
                        return False
                self.learner.step(window, batch, schedules.factor(self.schedule, self))
                for listener in step_listeners:
                    listener()
                self._commit()
                self.cursor = self.cursor.after(window)
                self.report.step()
                self._look()
                if self.cursor.batch == loader_batches.MANY and self.batches_of_epoch() is None:
                    self._warn_of_endless(window)
                every = self.settings.checkpoints.every
                if every and self.cursor.step % every == 0 and self.cursor.step > first:
                    self.save_once()
                if self.ending.check(self.cursor.step):
                    break
            else:
                return True
        if window is not None:
            loader_batches.check_agreed(window, self.learner.all_have, self._loader)
        known = self.learner.data.count is not None or self.cursor.batch == most
        return known and self.cursor.batch == self.batches_of_epoch()

    def _batches_left(self) -> Generator[tuple[Window, Any]]:
        limits, at = self.settings.limits, self.cursor
        if limits.overfit_batches is not None:
            at = dataclasses.replace(at, epoch=0)  # the samples of the first epoch, in its order
        pairs = self.learner.batches(at)
        if limits.batches is not None:
            pairs = itertools.islice(pairs, max(0, limits.batches - at.batch))
        return loader_batches.agreed(pairs, self.learner.all_have, self._loader)

    @property
    def _loader(self) -> Any:
        return getattr(self.learner.data, "loader", None)

    def batches_of_epoch(self) -> int | None:
        """The batches of an epoch; for a loader as in the epoch before, or its ``len``; None where unknown."""
        count, most = self.learner.data.count, self.settings.limits.batches
        if count is not None:
            batches: int | None = -(-count // self.settings.batch_size)
        else:
            batches = self.batches_before or loader_batches.length(self.learner.data)
        return batches if most is None or batches is None else min(batches, most)

    def _warn_of_endless(self, window: Window) -> None:
        if not self.settings.limits.ends_training:
            batches = loader_batches.MANY
            self._warn(f"epoch {window.epoch + 1} has not ended after {batches} batches. {loader_batches.END_IT}")

    def save_once(self, folders: Sequence[str] = ("checkpoints",)) -> None:
        """Write a checkpoint into these folders of the run; into ``checkpoints`` only if this moment has none yet."""
        now = self.cursor, self.last_row
        saving.save(self, [folder for folder in folders if folder != "checkpoints" or self._saved != now])
        if "checkpoints" in folders:
            self._saved = now

    def _check_repeats(self) -> None:
        """Warn if a job resumes at the start of an epoch and its loader gives another order than before."""
        before, loader = self.cursor.first_batch, self._loader
        if self.cursor.batch or not self.cursor.epoch or before is None or isinstance(loader, Iterator):
            return
        if self.settings.limits.overfit_batches is not None:
            return
        windows = (window for window, _ in self.learner.batches(Cursor(self.cursor.epoch - 1)))
        first = next(windows, None)
        windows.close()
        if (first is None or first.digest != before) and self.first:
            self._warn(loader_batches.not_repeated_epoch(loader, self.cursor.epoch))

    def _warn(self, text: str) -> None:
        self.say({"kind": "warning", "text": text})

    def _look(self) -> None:
        """Every 0.2 seconds: report progress, with the figures that have already arrived."""
        now = time.perf_counter()
        if now - self._shown < _SHOW_EVERY:
            return
        self._shown = now
        figures = self.learner.peek()
        if figures is not None:
            running_sums.check(self, figures)
        answer = self.say(
            {
                "kind": "progress",
                "epoch": self.cursor.epoch + 1,
                "step": self.cursor.step,
                "batch": self.cursor.batch,
                "batches": self.batches_of_epoch(),
                "samples": self.cursor.sample,
                "loss": figures.loss if figures and figures.count else None,
                "accuracy": or_none(figures.accuracy) if figures else None,
            }
        )
        self.report.heard(answer)

    def report_alive(self) -> None:
        self._shown = time.perf_counter()
        self.say({"kind": "alive", "step": self.cursor.step})

    def _report_alive_periodically(self) -> None:
        """After each batch of an evaluation."""
        self.ending.interrupt_evaluation()
        self._evaluated += 1
        if self._evaluated == loader_batches.MANY and self.first and _has_unknown_length(self.learner.test):
            self._warn(
                f"the evaluation has not ended after {loader_batches.MANY} batches. If the validation data have no "
                "end, say how many batches to take: limits=mh.Limits(limit_val_batches=100)"
            )
        if time.perf_counter() - self._shown > _SHOW_EVERY:
            self.report_alive()

    # The end of an epoch

    def _count_batches(self) -> None:
        says = loader_batches.length(self.learner.data)
        if self.batches_before is None and says not in (None, self.cursor.batch):
            self.learner.notes.append(
                f"the loader's len is {says}, and it gave {counted(self.cursor.batch, 'batch', 'batches')}: progress "
                "and schedule go by the batches of the epoch before"
            )
        self.batches_before = self.cursor.batch

    def _read_figures(self) -> Figures:
        """The epoch's figures over all processes; waits."""
        figures = together(self.learner.read())
        self.report.report_steps(wait=True)
        running_sums.check(self, figures)
        if figures.bad_step is not None and self.first:
            self._warn(f"{running_sums.describe(self, figures.bad_step)}; continuing, as requested")
        return figures

    def _end_epoch(self, *, over: bool) -> None:
        """The figures and the checkpoint at the end of an epoch, or of a job that ends within one (not ``over``)."""
        figures = self._read_figures()
        self._commit()
        self._owes_evaluation = False
        if self.cursor.step > self.last_row:
            epoch, (every, unit) = self.cursor.epoch, self.settings.limits.evaluation
            due = (epoch + 1) % every == 0 if unit == "epochs" else self._evaluation_is_due()
            is_last = self.is_over or self.report.stop is not None
            is_last = is_last or (over and epoch + 1 >= self.settings.max_epochs)
            if is_last and not (over and due):
                self._add_last_row(figures, over=over)
                return
            self._add_row(figures, evaluates=due, ends_epoch=True, over=over)
        if over:
            self._next_epoch()
        is_last = self.is_over or self.report.stop is not None
        regular = ["checkpoints"] if is_last or not self.settings.checkpoints.every else []
        self.save_once([*self.report.take_wanted_folders(), *regular])

    def _next_epoch(self) -> None:
        if self.learner.data.count is None:
            self._count_batches()
        self.cursor = self.cursor.next_epoch()
        schedules.after_epoch(self)

    def _add_last_row(self, figures: Figures, *, over: bool) -> None:
        """Add an evaluated row at an end where a job with larger limits would have no row.

        The checkpoint is from before that row: in a resumed job schedulers and callbacks have not seen it, so the job
        continues as if it had never ended here.
        """
        before = saving.captured(self)
        if self._saved != (self.cursor, self.last_row):
            saving.write(self, before, ["checkpoints"])
            self._saved = self.cursor, self.last_row
        stop, by = self.report.stop, self.report.stopped_by
        self._add_row(figures, evaluates=True, ends_epoch=True, over=over, counts=False)
        self.report.stop, self.report.stopped_by = stop, by
        saving.write(self, before, self.report.take_wanted_folders())
        if over:
            self._next_epoch()
        saving.mark_end(self)

    def _evaluation_is_due(self) -> bool:
        """Whether ``evaluate_every`` asks for an evaluation after the step that was made last."""
        every, unit = self.settings.limits.evaluation
        return unit == "steps" and self.cursor.step % every == 0 and self.cursor.step > self.last_row

    @property
    def seconds_of_row(self) -> float:
        """The training time since the row before, or since the epoch began; a resumed job goes on counting."""
        return time.perf_counter() - self._row_began

    def _add_row(
        self, figures: Figures, *, evaluates: bool, ends_epoch: bool = False, over: bool = False, counts: bool = True
    ) -> None:
        """Add a row with the figures since the row before; ``counts``: schedulers see it."""
        seconds = self.seconds_of_row
        self.report_alive()
        tested, metrics = self._evaluate(self.cursor.epoch + 1) if evaluates else (None, {})
        self.report_alive()
        self.learner.reset()
        row = {
            "epoch": self.cursor.epoch + 1,
            "step": self.cursor.step,
            "train_loss": or_none(figures.loss),
            "train_acc": or_none(figures.accuracy),
            "val_loss": or_none(tested.loss) if tested else None,
            "val_acc": or_none(tested.accuracy) if tested else None,
            **metrics,
            "samples": int(figures.count),
            "seconds": seconds,
            "whole": over and self.last_row <= self.cursor.step - self.cursor.batch,  # no other row in this epoch
            **self.report.rates(),
        }
        self.last_row, self._row_began = self.cursor.step, time.perf_counter()
        if counts:
            schedules.after_row(self, row)
        self.result.rows.append(row)
        if self.run is not None and (warning := self.run.add_row(row)) is not None:
            self._warn(warning)
        if ends_epoch:
            self.report.epoch_end(row, figures)
        else:
            self.report.row(row, figures)

    def _evaluate(self, epoch: int) -> tuple[Figures | None, dict[str, Any]]:
        """Figures over the validation data, and the user's metrics by the names that they have in a row."""
        self._evaluated = 0
        with self.learner.averaged():
            tested, values = evaluate_with_metrics(self.learner, self.metrics, self._report_alive_periodically)
        metrics = {f"val_{name}": value for name, value in values.items()}
        if tested is not None:
            known = {name: value for name, value in metrics.items() if value is not None}
            self.report.evaluated({**named(tested, "val"), **known}, epoch)
        return tested, metrics

    def _unsaved(self) -> list[str]:
        """What the run's folder lacks at the end of the job."""
        if self.run is None:
            return []
        rows = ", ".join(str(row["epoch"]) for row in self.run.unwritten)
        figures = [f"{self.run.metrics_path.name} lacks the figures of epoch {rows}"] if rows else []
        return figures + saving.unsaved_weights(self.run, self.cursor.step)


def _has_unknown_length(data: Data | None) -> bool:
    return data is not None and data.count is None and loader_batches.length(data) is None
