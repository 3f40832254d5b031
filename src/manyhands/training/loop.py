"""Training from the first step to the last, in any framework: a learner makes the steps, the loop does the rest.

Nothing in a step makes the host wait: losses stay on the devices, and what is shown is what has arrived by itself. The
host waits at the end of an epoch and for a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.errors import BadSettings, LossIsNotANumber
from manyhands.training.callbacks.plan import NO_CALLBACKS, CallbackPlan
from manyhands.training.callbacks.reporter import Reporter
from manyhands.training.callbacks.step_means import named
from manyhands.training.checkpoints import saving
from manyhands.training.checkpoints.run_folder import RunFolder, RunPlan
from manyhands.training.data import loader_batches
from manyhands.training.data.order import Cursor, Window, epoch_order
from manyhands.training.evaluation import evaluate
from manyhands.training.evaluation.metrics import Metrics
from manyhands.training.learner import NAN_HINT, SCHEDULE_HINT, Learner, Say, Schedule
from manyhands.training.result import Result
from manyhands.training.running_sums import Figures, or_none, together
from manyhands.training.settings import Settings

_SHOW_EVERY = 0.2  # seconds between looks at figures that have arrived
_NAMED = 8  # samples of a batch that an error lists

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
        self.batches_before: int | None = None  # that a loader gave in the epoch before
        self.keeps_checkpoints = run is not None
        self.run = RunFolder(run.path) if run is not None and self.first else None
        self._begun: Cursor | None = None  # where the job begins; None again after its first step
        self._unwritten: list[dict[str, Any]] = []  # rows that the disk has refused so far
        self._shown = time.perf_counter()
        try:
            self._begin(run, resume)
        except BaseException:
            self._close()
            raise

    def _begin(self, run: RunPlan | None, resume: Path | None) -> None:
        """Restore, and only then begin a run: a job that is refused leaves its folder as it was."""
        if self.run is not None and self.run.path.is_dir():
            self.run.lock()  # also for reading: nobody shall write meanwhile
        if self.report.plan.average is not None:
            self.learner.keep_average(self.report.plan.average)
        self.report.resumed = resumed = saving.restore(self, resume, run.announced if run is not None else ())
        self._check_schedule()
        if (note := loader_batches.unseeded(self.learner.data)) is not None:
            self.learner.notes.append(note)
        if self.run is not None and run is not None:
            note = self.run.begin(run, self.settings.as_dict())
            if note is not None:
                self.say({"kind": "warning", "text": note})
            self.result.rows = saving.rows_before(self.run, self.cursor)
            self._begun = self.cursor
        if resumed:
            saving.share_rows(self)

    def _commit(self) -> None:
        """Write to a run that is there already, now that the job's first step was made."""
        if self.run is not None and self._begun is not None:
            self.run.commit()
            saving.rewind(self.run, self._begun)
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
            self.say_alive()
            if self.cursor.epoch >= self.settings.max_epochs:
                self.learner.notes.append("this run was at its end already: nothing was trained, its figures are shown")
                if self.run is not None:
                    self.run.restore_config()
            else:
                self._check_repeats()
            self.report.begin()
            while self.cursor.epoch < self.settings.max_epochs and self.report.stop is None:
                self.report.epoch_start()
                whole = self.cursor.sample == 0
                start = time.perf_counter()
                self._train_epoch()
                figures = self._read_figures()
                seconds = time.perf_counter() - start
                self._end_epoch(figures, seconds, whole=whole)
            self._say_stop()
            self.result.notes = self.learner.notes
            self.result.shares = self.learner.shares
            self.result.unsaved = self._unsaved()
            return self.result
        except BaseException:
            if self.run is not None and self._begun is not None:
                self.run.withdraw()
            raise
        finally:
            self._close()

    def _say_stop(self) -> None:
        """Why the training ends before its last epoch, if it does."""
        if self.report.stop is None:
            return
        self.result.stopped = self.report.stop
        text = f"stopped after epoch {self.cursor.epoch}: {self.report.stop}"
        self.learner.notes.append(text)
        self.say({"kind": "note", "text": text})

    def _train_epoch(self) -> None:
        first = self.cursor.step
        loader = getattr(self.learner.data, "loader", None)
        for window, batch in loader_batches.agreed(self.learner.batches(self.cursor), self.learner.all_have, loader):
            self.learner.step(window, batch, self._factor())
            for listener in step_listeners:
                listener()
            self._commit()
            self.cursor = self.cursor.after(window)
            self.report.step()
            self._look(window)
            if self.cursor.batch == loader_batches.MANY and self.batches_of_epoch() is None:
                batches = loader_batches.MANY
                self._warn(f"epoch {window.epoch + 1} has not ended after {batches} batches. {loader_batches.END_IT}")
            every = self.settings.checkpoints.every
            if every and self.cursor.step % every == 0 and self.cursor.step > first:
                saving.save(self)

    def _factor(self) -> float | None:
        """The learning rate's factor at the next batch; None where there is no schedule."""
        if self.schedule is None:
            return None
        batches = self.batches_of_epoch()
        done = min(self.cursor.batch / batches, 1.0) if batches else 0.0
        return _factor_at(self.schedule, (self.cursor.epoch + done) / self.settings.max_epochs)

    def batches_of_epoch(self) -> int | None:
        """The batches of an epoch; of a loader those of the epoch before, or what its ``len`` says; None: not known."""
        count = self.learner.data.count
        if count is not None:
            return -(-count // self.settings.batch_size)
        return self.batches_before or loader_batches.length(self.learner.data)

    def _check_schedule(self) -> None:
        """A schedule has to know how far an epoch is."""
        if (
            self.schedule is None
            or self.batches_of_epoch() is not None
            or self.cursor.epoch >= self.settings.max_epochs
        ):
            return
        if self.settings.max_epochs == 1:
            raise BadSettings(
                "schedule= follows how much of the training is done, and the loader does not say how many batches an "
                "epoch has: give a loader with __len__, or (X, y) arrays"
            )
        self.learner.notes.append(
            "the loader does not say how many batches an epoch has (it has no __len__): the schedule stands still in "
            "the first epoch and moves with every batch from the second on"
        )

    def _check_repeats(self) -> None:
        """Say so where a job goes on at the start of an epoch and its loader is in another order than before."""
        before, data = self.cursor.first_batch, self.learner.data
        loader = getattr(data, "loader", None)
        if self.cursor.batch or not self.cursor.epoch or before is None or isinstance(loader, Iterator):
            return
        windows = (window for window, _ in self.learner.batches(Cursor(self.cursor.epoch - 1)))
        first = next(windows, None)
        windows.close()
        if (first is None or first.digest != before) and self.first:
            self._warn(loader_batches.not_repeated_epoch(loader, self.cursor.epoch))

    def _warn(self, text: str) -> None:
        self.say({"kind": "warning", "text": text})

    def _look(self, window: Window) -> None:
        """Now and then: say how far this process is, with the figures that have arrived by themselves."""
        now = time.perf_counter()
        if now - self._shown < _SHOW_EVERY:
            return
        self._shown = now
        figures = self.learner.peek()
        if figures is not None:
            self.check_numbers(figures)
        self.say(
            {
                "kind": "progress",
                "epoch": window.epoch + 1,
                "step": self.cursor.step,
                "batch": self.cursor.batch,
                "batches": self.batches_of_epoch(),
                "samples": self.cursor.sample,
                "loss": figures.loss if figures and figures.count else None,
                "accuracy": or_none(figures.accuracy) if figures else None,
            }
        )

    def say_alive(self) -> None:
        self._shown = time.perf_counter()
        self.say({"kind": "alive", "step": self.cursor.step})

    def _say_alive_now_and_then(self) -> None:
        if time.perf_counter() - self._shown > _SHOW_EVERY:
            self.say_alive()

    # Losses that are NaN

    def check_numbers(self, figures: Figures) -> None:
        if figures.bad_step is None or self.settings.step.on_nan == "continue":
            return
        raise LossIsNotANumber(
            f"{self._bad_step_in_words(figures.bad_step)}. {self._bad_samples(figures.bad_step) or NAN_HINT}"
        )

    def _bad_samples(self, step: int) -> str | None:
        """What is NaN in the samples of a step, where the learner can look at them again."""
        look, numbers = getattr(self.learner, "bad_samples", None), self._samples_of(step)
        if look is None or numbers is None:
            return None
        with contextlib.suppress(Exception):  # the loss is what counts
            words: str | None = look(numbers)
            return words
        return None

    def _samples_of(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        size, data = self.settings.batch_size, self.learner.data
        if data.count is None:
            return None
        batch = self.cursor.batch - (self.cursor.step - step)
        order = epoch_order(self.settings.seed, self.cursor.epoch, data.count, shuffle=data.shuffle)
        return order[batch * size : (batch + 1) * size]

    def _bad_step_in_words(self, step: int) -> str:
        epoch, numbers = self.cursor.epoch, self._samples_of(step)
        which = f"batch {self.cursor.batch - (self.cursor.step - step)} of the loader"
        if numbers is not None:
            which = f"samples {', '.join(map(str, numbers[:_NAMED]))}{', ...' if len(numbers) > _NAMED else ''}"
        return f"the loss or a gradient of step {step} is not a number (epoch {epoch + 1}, {which})"

    # The end of an epoch

    def _count_batches(self) -> None:
        says = loader_batches.length(self.learner.data)
        if self.batches_before is None and says not in (None, self.cursor.batch):
            self.learner.notes.append(
                f"the loader's len is {says}, and it gave {self.cursor.batch} batches: progress and schedule go by the "
                "batches of the epoch before"
            )
        self.batches_before = self.cursor.batch

    def _read_figures(self) -> Figures:
        """The epoch's figures over all processes; waits."""
        figures = together(self.learner.read())
        self.report.hand_on(wait=True)
        self.check_numbers(figures)
        if figures.bad_step is not None and self.first:
            self._warn(f"{self._bad_step_in_words(figures.bad_step)}; going on, as asked")
        return figures

    def _end_epoch(self, figures: Figures, seconds: float, *, whole: bool) -> None:
        epoch = self.cursor.epoch
        self._commit()
        self.say_alive()
        with self.learner.averaged():
            tested, values = evaluate.figures_of(self.learner, self.metrics, self._say_alive_now_and_then)
        metrics = {f"val_{name}": value for name, value in values.items()}
        self.say_alive()
        if tested is not None:
            self.report.evaluated(
                {**named(tested, "val"), **{name: value for name, value in metrics.items() if value is not None}}
            )
        if self.learner.data.count is None:
            self._count_batches()
        self.cursor = self.cursor.next_epoch()
        self.learner.reset()
        row = {
            "epoch": epoch + 1,
            "step": self.cursor.step,
            "train_loss": or_none(figures.loss),
            "train_acc": or_none(figures.accuracy),
            "val_loss": or_none(tested.loss) if tested else None,
            "val_acc": or_none(tested.accuracy) if tested else None,
            **metrics,
            "samples": int(figures.count),
            "seconds": seconds,
            "whole": whole,
            **self.report.rates(),
        }
        self.result.rows.append(row)
        if self.run is not None:
            self._write_row(self.run, row)
        self.report.epoch_end(row, figures)
        is_last = self.cursor.epoch == self.settings.max_epochs or self.report.stop is not None
        regular = ["checkpoints"] if is_last or not self.settings.checkpoints.every else []
        saving.save(self, [*self.report.take_wanted(), *regular])

    def _write_row(self, run: RunFolder, row: dict[str, Any]) -> None:
        """Append to metrics.jsonl. Rows that a full disk refuses are tried again at the end of the next epoch."""
        self._unwritten.append(row)
        try:
            while self._unwritten:
                run.append_metrics(self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            self.say(
                {
                    "kind": "warning",
                    "text": f"the figures of epoch {row['epoch']} could not be written to {run.metrics_path}: "
                    f"{error.strerror or error}. The training goes on",
                }
            )

    def _unsaved(self) -> list[str]:
        """What the run's folder lacks at the end of the job."""
        if self.run is None:
            return []
        rows = ", ".join(str(row["epoch"]) for row in self._unwritten)
        figures = [f"{self.run.metrics_path.name} lacks the figures of epoch {rows}"] if rows else []
        return figures + saving.unsaved_weights(self.run, self.cursor.step)


def _factor_at(schedule: Schedule, done: float) -> float:
    """What the schedule says, if it is a factor."""
    try:
        given: Any = schedule(done)
    except TypeError as error:
        if "is not an Optimizer" not in str(error):
            raise
        raise BadSettings(f"schedule is a function of an optimizer, and {SCHEDULE_HINT}") from error
    try:
        factor = float(given)
    except (TypeError, ValueError) as error:
        raise BadSettings(f"schedule({done:g}) gave a {type(given).__name__}: {SCHEDULE_HINT}") from error
    if not 0 <= factor < math.inf:
        raise BadSettings(f"schedule({done:g}) gave {factor}: a factor of the learning rate is zero or more")
    return factor
