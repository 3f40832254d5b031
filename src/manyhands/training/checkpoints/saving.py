"""Saves a job's checkpoint, and resumes from one: the part that is the same in every framework."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.amounts import counted
from manyhands.errors import CheckpointNotWritten, WrongCheckpoint
from manyhands.training import running_sums
from manyhands.training.checkpoints import store
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.data.order import Cursor
from manyhands.training.learner import AVERAGE_DROPPED, Learner, Saved
from manyhands.training.running_sums import Figures, of_one, together
from manyhands.training.settings import Settings
from manyhands.training.stopping import ENDLESS

if TYPE_CHECKING:
    from manyhands.training.loop import Loop

# Settings that may change when a job is resumed, in words.
_ANNOUNCED = {
    "lr": "learning rate",
    "max_epochs": "epochs",
    "gradient_clip_val": "gradient clipping",
    "accumulate": "accumulation",
    "batch_stats": "batch statistics",
    "precision": "precision",
    "on_nan": "on_nan",
}


def save(loop: Loop, folders: Sequence[str] = ("checkpoints",)) -> None:
    """Write a checkpoint of this moment into these folders of the run; every process takes part, the first one writes.

    Older ones are deleted in ``checkpoints`` only; callbacks delete those in their own folders.
    """
    if folders:
        write(loop, captured(loop), folders)


def captured(loop: Loop) -> Saved | None:
    """The content of a checkpoint of this moment; every process takes part, and all but the first get None."""
    if not loop.keeps_checkpoints:
        return None
    learner = loop.learner
    figures = learner.read()
    running_sums.check(loop, together(figures))
    loop.report.report_steps(wait=True)
    saved = learner.save()
    if loop.run is None or saved is None:
        return None
    state = {
        **saved.state,
        "framework": learner.framework,
        "cursor": asdict(loop.cursor),
        "settings": loop.settings.as_dict(),
        "samples": learner.data.count,
        "shuffle": learner.data.shuffle,
        "optimizer_type": learner.optimizer_name,
        "optimizer_options": learner.optimizer_options,
        "figures": [figure.as_json() for figure in figures],
        "shares": learner.shares,
        "batches_before": loop.batches_before,
        "callbacks": loop.report.states(),
        "last_row": loop.last_row,
        "seconds_of_row": loop.seconds_of_row,
        "end": None,
        "seconds": loop.ending.seconds,
    }
    return Saved(state, saved.blobs)


def mark_end(loop: Loop) -> None:
    """Note in the newest checkpoint that the job ended there and was evaluated: ``end``.

    The checkpoint was written before that evaluation: without the note a resumed job would not know of it.
    """
    if loop.run is not None:
        store.amend(store.path_of(loop.run.checkpoints, loop.cursor.step), end={"epoch": loop.cursor.epoch})


def write(loop: Loop, content: Saved | None, folders: Sequence[str]) -> None:
    """Write what was captured at the job's last step into these folders of the run."""
    if content is None or loop.run is None:
        return
    for name in folders:
        loop.report_alive()
        path = loop.run.path / name
        keep = loop.settings.checkpoints.keep if path == loop.run.checkpoints else None
        try:
            loop.report.checkpoint(store.save(path, loop.cursor.step, content.state, content.blobs, keep=keep))
        except CheckpointNotWritten as error:
            loop.say({"kind": "warning", "text": f"{error} Training continues"})
        loop.report_alive()


def restore(loop: Loop, path: Path | None) -> Mapping[str, Any] | None:
    """Resume from a checkpoint, if there is one, on any number of devices. Writes no file.

    Returns the checkpoint's state, for :func:`announce`; None without a checkpoint.

    The first process reads it and sends it to the others, which may be on machines that do not have the file.
    """
    learner = loop.learner
    checkpoint = store.load(path) if path is not None and loop.first else None
    header = {"state": checkpoint.state, "blobs": list(checkpoint.blobs)} if checkpoint is not None else {}
    header = json.loads(learner.from_first(json.dumps(header).encode()))
    if not header:
        return None
    blobs = {name: learner.from_first(checkpoint.blobs[name] if checkpoint else b"") for name in header["blobs"]}
    state = header["state"]
    check_fits(state, loop.settings, learner)
    figures = [Figures.from_json(sums) for sums in state["figures"]]
    learner.restore(state, blobs, of_one(figures, learner.rank, learner.size))
    if "average" in blobs and loop.report.plan.average is None:
        learner.notes.append(AVERAGE_DROPPED)
    loop.cursor = Cursor(**state["cursor"])
    loop.batches_before = state.get("batches_before")
    loop.report.states_before = state.get("callbacks")
    loop.last_row = state.get("last_row", loop.cursor.step - (1 if loop.cursor.sample else 0))
    loop.seconds_before = state.get("seconds_of_row", 0.0)
    loop.ending.resume(state.get("seconds", 0.0))
    loop.end_before = state.get("end", {})
    return dict(state)


def announce(loop: Loop, before: Mapping[str, Any], announced: Collection[str] = ()) -> None:
    """Say where the job resumes, and which settings have changed: the new ones count."""
    learner, settings, saved = loop.learner, _flat(loop.settings.as_dict()), _flat(before["settings"])
    now = {words: settings[name] for name, words in _ANNOUNCED.items()} | learner.optimizer_options
    then = {words: saved.get(name, now[words]) for name, words in _ANNOUNCED.items()}
    then |= before.get("optimizer_options", {})
    if not learner.optimizer_options.keys().isdisjoint(("lr", "learning_rate")):  # the optimizer's own rate counts
        del now[_ANNOUNCED["lr"]]
    if settings["precision"] == "auto" and getattr(learner, "keeps_precision", False):
        del now[_ANNOUNCED["precision"]]
    known = {_ANNOUNCED.get(name, name) for name in announced} | set(announced)
    changed = [
        f"{name} {_in_words(value)} instead of {_in_words(then[name])}"
        for name, value in now.items()
        if name not in known and then.get(name, value) != value
    ]
    if changed:
        learner.notes.append(f"resumed with {', '.join(changed)}")
    most = loop.settings.max_epochs
    epochs = f"epoch {min(loop.cursor.epoch + 1, most)}" + (f" of {most}" if most < ENDLESS else "")
    new = f", with {', '.join(changed)}" if changed else ""
    begins = "nothing left to train: the run ended" if loop.is_over else "resuming"
    loop.say({"kind": "note", "text": f"{begins} after step {loop.cursor.step}, in {epochs}{new}"})


def _in_words(value: object) -> str:
    return "without a limit" if value == ENDLESS else str(value)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's own settings and those of its steps, by name."""
    return {**settings, **settings.get("step", {})}


def is_kept(name: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether an option of the optimizer keeps the job's value: the saved optimizer was made with another one."""
    options = saved.get("optimizer_options", {})
    return name in options and current.get(name) != options[name]


def rows_before(run: RunFolder, last_row: int) -> list[dict[str, Any]]:
    """The rows of a run that were written before its checkpoint was."""
    return [row for row in run.metrics(last_row) if "epoch" in row]


def rewind(run: RunFolder, begun: Cursor, last_row: int) -> None:
    """Delete figures and checkpoints of later steps than the one where the job begins."""
    run.truncate_metrics(last_row)
    store.amend(store.path_of(run.checkpoints, begun.step), end=None)  # its row is dropped
    for folder_of_checkpoints in run.folders_of_checkpoints():
        store.drop_after(folder_of_checkpoints, begun.step)


def share_rows(loop: Loop) -> None:
    """The epochs that are done already, for every process's result."""
    loop.result.rows = json.loads(loop.learner.from_first(json.dumps(loop.result.rows).encode()))


def unsaved_weights(run: RunFolder, step: int) -> list[str]:
    """In words, if the checkpoint of the last step is missing; else empty."""
    newest = store.latest(run.checkpoints)
    if newest is None:
        return [f"there is no checkpoint: the weights after step {step} are not saved"]
    last = store.step_of(newest)
    return (
        [] if last == step else [f"the last checkpoint is of step {last}: the weights after step {step} are not saved"]
    )


def check_fits(saved: Mapping[str, Any], settings: Settings, learner: Learner) -> None:
    """Refuse to resume with data or settings that would make it another job."""
    made_by = saved.get("framework", "torch")
    if made_by != learner.framework:
        raise WrongCheckpoint(
            f"the checkpoint was made with {made_by}, this job runs on {learner.framework}: make one for it with "
            f"manyhands convert RUN --to {learner.framework}"
        )
    before = saved["settings"]
    for name in ("batch_size", "seed"):
        if before[name] != getattr(settings, name):
            raise WrongCheckpoint(
                f"the checkpoint is of a job with {name}={before[name]}, this one has {getattr(settings, name)}: the "
                f"order of samples would not be the same. Give {name}={before[name]}"
            )
    if saved["samples"] != learner.data.count:
        raise WrongCheckpoint(
            f"the checkpoint is of a data set of {counted(saved['samples'], 'sample')}, this one has "
            f"{learner.data.count:,}. Give the data that the run had, or start a new run"
        )
    if saved["shuffle"] != learner.data.shuffle:
        before, here = ("shuffled", "not") if saved["shuffle"] else ("not shuffled", "shuffled")
        raise WrongCheckpoint(
            f"the checkpoint is of data in another order: they were {before}, and here they are {here}. Give them as "
            "before, or start a new run"
        )
    if saved["optimizer_type"] not in (None, learner.optimizer_name):  # None: only the weights, they were converted
        raise WrongCheckpoint(
            f"the checkpoint holds the state of the optimizer {saved['optimizer_type']}, this job has "
            f"{learner.optimizer_name}{_without_names(saved['optimizer_type'])}. Give the optimizer that the run had, "
            "or begin a new run with its weights: mh.load_weights(model, run), without resume="
        )


def _without_names(optimizer: str) -> str:
    """Why several optimizers of a checkpoint ("Adam+Adam", as older versions wrote it) fit no job."""
    if "+" not in optimizer:
        return ""
    return ". An older version wrote it without the names of its optimizers, so their states cannot be told apart"
