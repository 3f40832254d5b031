"""The folder of one run: its settings, its metrics, its checkpoints and its picture.

::

    runs/2031-05-04-130501/
        config.json      how the run was started
        metrics.jsonl    one JSON object per line, oldest first
        checkpoints/     see store.py
        curves.png
        step.txt         the parts of a step, if it was a fast one
        job.lock         while a job trains here
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from manyhands import files
from manyhands.errors import BadRunFolder, NoCheckpoint, RunInUse, type_in_words
from manyhands.training.checkpoints import store

_LOCK = "job.lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system without locks


@dataclass(frozen=True)
class RunPlan:
    """The folder that a job will write to. Nothing is written before the job has passed all its checks."""

    path: Path
    resumes: bool  # whether a run that is there may be continued
    # What config.json says besides the settings.
    config: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse a path that cannot be this job's folder; reads only."""
        run = RunFolder(self.path)
        with named_refusals(self.path):
            run.check_is_run_or_new()
            if not self.resumes and (store.latest(run.checkpoints) is not None or run.metrics()):
                raise BadRunFolder(
                    f"{self.path} holds a run already: give resume='auto' to continue it, or another folder to "
                    "start a new one"
                )


def plan_run(run: str | Path | None, resume: str | Path | None, config: Mapping[str, Any]) -> RunPlan | None:
    """The plan for ``Trainer(run=..., resume=...)``; None where nothing is written."""
    if run is None:
        return None
    path = Path(run).expanduser().absolute()
    resumes = resume == "auto" or (
        resume is not None and Path(resume).expanduser().resolve().is_relative_to(path.resolve())
    )
    return RunPlan(path, resumes, dict(config))


def checkpoint_to_resume(resume: str | Path | None, run: RunPlan | None) -> Path | None:
    """The checkpoint, or the folder of them, that ``Trainer(resume=...)`` means; None to start anew."""
    if resume is None:
        return None
    if resume == "auto":
        folder = None if run is None else run.path / "checkpoints"
        return folder if folder is not None and store.latest(folder) is not None else None
    path = Path(resume).expanduser()
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not folder.exists():
        raise NoCheckpoint(f"there is no run or checkpoint at {path}")
    return folder


class RunFolder:
    """One run's folder: `create` makes a new one, `open` opens one that exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path, self.metrics_path = path / "config.json", path / "metrics.jsonl"
        self.checkpoints, self.plot_path = path / "checkpoints", path / "curves.png"
        self.unwritten: list[dict[str, Any]] = []  # rows that the disk has refused so far
        self._lock: filelock.FileLock | None = None
        self._lock_note: str | None = None

    @classmethod
    def create(cls, root: Path = Path("runs"), name: str | None = None) -> RunFolder:
        """A new folder, named after the time unless a name is given; a number follows if the name is taken."""
        root = Path(root)
        wanted = name or time.strftime("%Y-%m-%d-%H%M%S")
        path, number = root / wanted, 1
        with named_refusals(root):
            root.mkdir(parents=True, exist_ok=True)
            while True:
                try:
                    path.mkdir()  # one call both asks and takes, so two runs at once never share a folder
                    return cls(path)
                except FileExistsError:
                    number += 1
                    path = root / f"{wanted}-{number}"

    @classmethod
    def at(cls, path: Path) -> RunFolder:
        """The run at this path: an existing run, or a new one if there is nothing or an empty folder."""
        run = cls(Path(path))
        with named_refusals(run.path):
            run.check_is_run_or_new()
            run.path.mkdir(parents=True, exist_ok=True)
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that was started before."""
        run = cls(Path(path))
        if not run.path.is_dir():
            raise BadRunFolder(f"there is no run in {run.path}: no such folder.")
        if not run.config_path.is_file():
            raise BadRunFolder(f"there is no run in {run.path}: it has no {run.config_path.name}.")
        return run

    def check_is_run_or_new(self) -> None:
        """Refuse a file, and a folder with other things than a run in it."""
        if self.config_path.exists() or not self.path.exists():
            return
        if not self.path.is_dir():
            raise BadRunFolder(f"{self.path} is a file: a run needs a folder. Name another path.")
        if any(entry.name != _LOCK for entry in self.path.iterdir()):
            raise BadRunFolder(f"{self.path} holds other things than a run (no config.json): name another folder.")

    def lock(self) -> str | None:
        """Keep other jobs out until `release`, or until this process ends; a note where the files have no locks."""
        if self._lock is not None or self._lock_note is not None:
            return self._lock_note
        path, lock = self.path / _LOCK, filelock.FileLock(self.path / _LOCK, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except filelock.Timeout:
            holder = ""
            with contextlib.suppress(OSError):
                holder = path.read_text(errors="replace").strip()
            raise RunInUse(
                f"{self.path} is in use: {holder or 'another process'} trains in it. Wait until it has ended, stop it, "
                "or give another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                with named_refusals(self.path):
                    raise
            path.unlink(missing_ok=True)
            why = error.strerror or error
            self._lock_note = f"{self.path} could not be locked ({why}): make sure that no other job trains in it"
            return self._lock_note
        self._lock = lock
        with contextlib.suppress(OSError):  # a full disk: the run is locked, but the file does not name the holder
            path.write_text(f"process {os.getpid()} on {platform.node() or 'this machine'}\n")
        return None

    def release(self) -> None:
        """Unlock the run."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                (self.path / _LOCK).unlink()  # before the lock is released, so that no other job holds it yet
            self._lock.release()
            self._lock = None

    def begin(self, plan: RunPlan, settings: Mapping[str, Any], chosen: tuple[str, str] | None = None) -> str | None:
        """Make the folder if need be, lock it, and write down how the job was started; the lock's note.

        ``chosen``: which precision ``"auto"`` is, and why; a resumed run keeps its first reason.
        """
        with named_refusals(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            note = self.lock()
            plan.check()  # again: another job may have been here meanwhile
            before = self.config if self.config_path.exists() else {}
            after = {**before, **plan.config, "settings": dict(settings)}
            if chosen is not None and before.get("chosen", {}).get("precision") != chosen[0]:
                after["chosen"] = dict(zip(("precision", "why"), chosen, strict=True))
            if after != before:
                self.config = after
        return note

    def write_step(self, words: str) -> None:
        """Write step.txt: the parts of a step of this run."""
        files.replace(self.path / "step.txt", (words + "\n").encode())

    @property
    def config(self) -> dict[str, Any]:
        """How the run was started. Setting it writes the file, in one moment."""
        try:
            value = files.read_json(self.config_path.read_bytes())
        except FileNotFoundError as error:
            raise BadRunFolder(f"{self.config_path} is missing.") from error
        except ValueError as error:
            raise BadRunFolder(f"{self.config_path} is not JSON: {error}.") from error
        if not isinstance(value, dict):
            raise BadRunFolder(f"{self.config_path} holds {type_in_words(value)}, not a JSON object.")
        return value

    @config.setter
    def config(self, value: Mapping[str, Any]) -> None:
        text = files.exact_json(dict(value), "config", indent=2) + "\n"
        files.replace(self.config_path, text.encode())

    # Rows. The file is replaced for each of them, so it is never torn.

    def add_row(self, row: Mapping[str, Any]) -> str | None:
        """Add a row to metrics.jsonl; NaN becomes null. The warning of a full disk; the next call tries again."""
        odd = {name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
        self.unwritten.append({**row, **dict.fromkeys(odd)})
        try:
            self.write_rows([*self.metrics(), *self.unwritten])
        except OSError as error:
            return (
                f"the metrics of epoch {row['epoch']} could not be written to {self.metrics_path}: "
                f"{error.strerror or error}. Training continues"
            )
        self.unwritten = []
        return None

    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        files.replace(self.metrics_path, "".join(files.exact_json(dict(row), "row") + "\n" for row in rows).encode())

    def metrics(self, until: float = math.inf) -> list[dict[str, Any]]:
        """Every row up to a step, oldest first."""
        try:
            lines = self.metrics_path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        try:
            rows: list[dict[str, Any]] = [files.read_json(line) for line in lines]
            return [row for row in rows if row["step"] <= until]
        except (ValueError, TypeError, KeyError) as error:
            raise BadRunFolder(f"{self.metrics_path} was changed: it has a line that is no row ({error}).") from error

    def truncate_metrics(self, step: int) -> None:
        """Drop the rows of later steps: for a run that resumes from an earlier one."""
        rows = self.metrics(step)
        if len(rows) < len(self.metrics()):
            with named_refusals(self.path):
                self.write_rows(rows)


@contextlib.contextmanager
def named_refusals(path: Path) -> Iterator[None]:
    """Turns an error of the operating system into one that names the folder."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise BadRunFolder(f"{path} cannot be a run's folder: {why}. Name one that can be written to.") from error
