"""Saves a job's checkpoint, and resumes from one: the part that is the same in every framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.errors import CheckpointNotWritten, WrongCheckpoint
from manyhands.training.callbacks.events import Reporter
from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder, RunPlan
from manyhands.training.data.order import Cursor, Position
from manyhands.training.learner import AVERAGE_DROPPED, Learner, Saved, share
from manyhands.training.options import ENDLESS, Settings
from manyhands.training.running_sums import NanCheck, Totals, add, totals_of_process
from manyhands.training.stopping import Ending

# Settings that may change when a job is resumed.
_ANNOUNCED = ("lr", "max_epochs", "gradient_clip_val", "accumulate", "batch_stats", "precision", "on_nan")


class Saver:
    """Writes the checkpoints of one job; every process takes part, and the first one writes."""

    def __init__(
        self,
        learner: Learner,
        position: Position,
        ending: Ending,
        report: Reporter,
        nan_check: NanCheck,
        plan: RunPlan | None,
    ) -> None:
        self._learner, self._position, self._ending = learner, position, ending
        self._report, self._nan_check, self._plan = report, nan_check, plan
        self._settings = position.settings
        # The run's folder, in the first process; None where nothing is written.
        self.run = RunFolder(plan.path) if plan is not None and learner.rank == 0 else None
        self._begun: tuple[Cursor, int] | None = None  # where a job stood that has made no step yet
        self._newest: tuple[Cursor, int] | None = None  # cursor and last row of the newest checkpoint

    # The run

    def lock(self) -> None:
        """Lock an existing run before it is read, so that no other job writes to it meanwhile."""
        if self.run is not None and self.run.path.is_dir():
            self.run.lock()

    def rows(self) -> list[dict[str, Any]]:
        """The rows that the run has so far. The job begins here."""
        if self.run is None:
            return []
        self._begun = self._position.cursor, self._position.last_row
        return self.run.metrics(self._position.last_row)

    def begin(self) -> None:
        """Begin the run, or take over one that is there, now that the first step (or an evaluation) has succeeded.

        Metrics and checkpoints of later steps than the one where the job begins are deleted.
        """
        if self.run is None or self._plan is None or self._begun is None:
            return
        (begun, last_row), self._begun = self._begun, None
        precision = getattr(self._learner, "chosen_precision", None)
        if (note := self.run.begin(self._plan, self._settings.as_dict(), precision)) is not None:
            self._report.warn(note)
        self.run.truncate_metrics(last_row)
        for folder in self.run.path.iterdir():
            if folder.is_dir():  # the newest checkpoints, and those that callbacks asked for
                store.drop_after(folder, begun.step)

    def close(self) -> None:
        if self.run is not None:
            self.run.release()

    # Checkpoints

    def save_once(self, folders: Sequence[str] = ("checkpoints",)) -> None:
        """Write a checkpoint into these folders of the run; into ``checkpoints`` only if this moment has none yet.

        Older ones are deleted in ``checkpoints`` only; callbacks delete those in their own folders.
        """
        now = self._position.cursor, self._position.last_row
        left = [folder for folder in folders if folder != "checkpoints" or self._newest != now]
        if left:
            self._write(self._content(), left)
        if "checkpoints" in left:
            self._newest = now

    def _content(self) -> Saved | None:
        """The content of a checkpoint of this moment; all processes but the first get None."""
        if self._plan is None:
            return None
        learner = self._learner
        totals = learner.read()
        self._nan_check.check(add(totals))
        self._report.report_steps(wait=True)
        saved = learner.save()
        if self.run is None or saved is None:
            return None
        state = {
            **saved.state,
            **self._position.state(),
            "framework": learner.framework,
            "settings": self._settings.as_dict(),
            "samples": learner.data.count,
            "shuffle": learner.data.shuffle,
            "optimizer_type": learner.optimizer_name,
            "optimizer_options": learner.optimizer_options,
            "totals": [part.as_json() for part in totals],
            "shares": learner.shares,
            "callbacks": self._report.states(),
            "seconds": self._ending.seconds,
        }
        return Saved(state, saved.blobs)

    def _write(self, content: Saved | None, folders: Sequence[str]) -> None:
        if content is None or self.run is None:
            return
        step = self._position.cursor.step
        for name in folders:
            self._report.alive()
            keep = self._settings.checkpoints.keep if name == "checkpoints" else None
            try:
                path = store.save(self.run.path / name, step, content.state, content.blobs, keep=keep)
                self._report.checkpoint(path)
            except CheckpointNotWritten as error:
                self._report.warn(f"{error} Training continues")
            self._report.alive()

    def list_unsaved(self) -> list[str]:
        """What the run's folder lacks at the end of the job, in words."""
        if self.run is None:
            return []
        rows = ", ".join(str(row["epoch"]) for row in self.run.unwritten)
        missing = [f"{self.run.metrics_path.name} lacks the metrics of epoch {rows}"] if rows else []
        step, newest = self._position.cursor.step, store.latest(self.run.checkpoints)
        last = None if newest is None else store.step_of(newest)
        if last != step:
            where = "there is no checkpoint" if last is None else f"the last checkpoint is of step {last}"
            missing.append(f"{where}: the weights after step {step} are not saved")
        return missing

    # Resuming

    def restore(self, path: Path | None) -> dict[str, Any] | None:
        """Resume from a checkpoint, if there is one, on any number of devices; its state. Writes no file.

        The first process reads it and sends it to the others, which may be on machines that do not have the file.
        """
        learner = self._learner
        checkpoint = store.load(path) if path is not None and learner.rank == 0 else None
        header = {"state": checkpoint.state, "blobs": list(checkpoint.blobs)} if checkpoint is not None else {}
        header = share(learner, header)
        if not header:
            return None
        blobs = {name: learner.from_first(checkpoint.blobs[name] if checkpoint else b"") for name in header["blobs"]}
        state: dict[str, Any] = header["state"]
        check_fits(state, self._settings, learner)
        totals = [Totals.from_json(sums) for sums in state["totals"]]
        learner.restore(state, blobs, totals_of_process(totals, learner.rank, learner.size))
        if "average" in blobs and self._report.plan.average is None:
            learner.notes.append(AVERAGE_DROPPED)
        self._position.restore(state)
        self._ending.resume(state["seconds"])
        self._report.states_before = state.get("callbacks")
        return state

    def announce(self, before: Mapping[str, Any], *, is_over: bool) -> None:
        """Say where the job resumes, and which settings have changed: the new ones count."""
        changed = changed_settings(before, self._settings, self._learner)
        if changed:
            self._learner.notes.append(f"resumed with {', '.join(changed)}")
        cursor, most = self._position.cursor, self._settings.max_epochs
        new = f", with {', '.join(changed)}" if changed else ""
        if is_over:
            limit = "max_epochs" if cursor.epoch >= most else self._ending.reached
            self._report.note(
                f"this run is finished, after step {cursor.step}{new}: nothing was trained. Give a larger {limit} to "
                "train on, or another run= to start anew"
            )
            return
        epochs = f"epoch {cursor.epoch + 1}" + (f" of {most}" if most < ENDLESS else "")
        self._report.note(f"resuming after step {cursor.step}, in {epochs}{new}")


def changed_settings(before: Mapping[str, Any], settings: Settings, learner: Learner) -> list[str]:
    """The settings that a resumed job has changed, in words."""
    flat = [{**each, **each.get("step", {})} for each in (settings.as_dict(), before["settings"])]
    now, then = ({name: each[name] for name in _ANNOUNCED if name in each} for each in flat)
    if not learner.optimizer_options.keys().isdisjoint(("lr", "learning_rate")):  # the optimizer's own rate counts
        del now["lr"]
    if now["precision"] == "auto" and then["precision"] != "fp64" and getattr(learner, "keeps_precision", False):
        del now["precision"]
    now |= learner.optimizer_options
    then |= before.get("optimizer_options", {})
    return [
        f"{name} {_in_words(value)} instead of {_in_words(then[name])}"
        for name, value in now.items()
        if then.get(name, value) != value
    ]


def _in_words(value: object) -> str:
    return "without a limit" if value == ENDLESS else str(value)


def is_kept(name: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether an option of the optimizer keeps the job's value: the saved optimizer was made with another one."""
    options = saved.get("optimizer_options", {})
    return name in options and current.get(name) != options[name]


def check_fits(saved: Mapping[str, Any], settings: Settings, learner: Learner) -> None:
    """Refuse to resume with data or settings that would make it another job."""
    made_by = saved.get("framework", "torch")
    if made_by != learner.framework:
        raise WrongCheckpoint(
            f"the checkpoint was made with {made_by}, this job runs on {learner.framework}: make one for it with "
            f"manyhands convert RUN --to {learner.framework}"
        )
    before, data = saved["settings"], learner.data
    order = ("data in their own order", "shuffled data")
    pairs = [(f"{name}={before[name]}", f"{name}={getattr(settings, name)}") for name in ("batch_size", "seed")]
    pairs += [(f"{saved['samples']} samples", f"{data.count} samples"), (order[saved["shuffle"]], order[data.shuffle])]
    for then, now in pairs:
        if then != now:
            raise WrongCheckpoint(
                f"the checkpoint is of a job with {then}, this one has {now}: the order of samples would not be the "
                "same. Give the data and the options that the run had, or start a new run"
            )
    if saved["optimizer_type"] not in (None, learner.optimizer_name):  # None: only the weights, they were converted
        raise WrongCheckpoint(
            f"the checkpoint holds the state of the optimizer {saved['optimizer_type']}, this job has "
            f"{learner.optimizer_name}. Give the optimizer that the run had, or begin a new run with its weights: "
            "mh.load_weights(model, run), without resume="
        )
