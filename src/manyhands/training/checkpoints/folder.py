"""The names in a folder of checkpoints, and how one is put there, replaced and deleted without a gap.

A whole checkpoint is named after its step. Everything else in the folder is a leftover, whose name
starts with a dot and has its step, its role, and the process that made it::

    step-00000100/
    step-00000200/
    .step-00000300.writing.4711.9f3c21aa.myhost/     not whole yet
    .step-00000200.replaced.4711.0b77d1e4.myhost/    an older step 200, until the new one is in place
    .step-00000001.deleted.4711.c2a90d55.myhost/     no longer wanted

A folder cannot be renamed over another one, so a step that exists is set aside first. Should the
writer die between the two renames, the one set aside counts as the checkpoint of its step.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
import time
import uuid
from pathlib import Path

from manyhands.training.checkpoints import atomic_files

_OLD = 3600.0  # seconds without a write after which a leftover's maker is taken for dead
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)  # of a rename: there is a folder of that name
_RACES = 20  # how often another process may come in between
_STEP = re.compile(r"step-([0-9]{8,18})")
_LEFTOVER = re.compile(r"\.(step-[0-9]{8,18})\.(writing|replaced|deleted)\.([0-9]{1,10})\.[0-9a-f]{8}\.(.+)")


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step belongs."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint, also of one that is set aside; None for other names."""
    leftover = _LEFTOVER.fullmatch(path.name)
    name = leftover[1] if leftover and leftover[2] == "replaced" else path.name
    whole = _STEP.fullmatch(name)
    return int(whole[1]) if whole else None


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Steps and paths of all checkpoints, the highest step first."""
    by_step: dict[int, Path] = {}
    for path in _entries(folder):
        step = step_of(path)
        if step is None or not path.is_dir():
            continue
        if step not in by_step or not path.name.startswith("."):  # the one in place goes before one set aside
            by_step[step] = path
    return sorted(by_step.items(), reverse=True)


def temporary(folder: Path, step: int) -> Path:
    """A new folder to write a checkpoint into."""
    path = _leftover(path_of(folder, step), "writing")
    path.mkdir()
    return path


def put_in_place(written: Path, target: Path) -> None:
    """Rename a folder that is whole and synced, over an older one of that name if need be."""
    aside: list[Path] = []
    try:
        for _ in range(_RACES):
            try:
                os.rename(written, target)
                atomic_files.sync_folder(target.parent)
                return
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
            aside.append(_leftover(target, "replaced"))
            with contextlib.suppress(FileNotFoundError):  # another writer of this step was faster: try again
                os.rename(target, aside[-1])
        raise OSError(errno.EBUSY, f"other processes keep writing {target.name}")
    finally:
        for path in aside:
            _settle(path, target)


def delete(path: Path) -> None:
    """Delete a checkpoint, renaming it first: a half-deleted one never has its name."""
    doomed = _leftover(path, "deleted")
    with contextlib.suppress(OSError):
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Delete the leftovers of killed writers, and put back the checkpoints that they had set aside."""
    for path in _entries(folder):
        match = _LEFTOVER.fullmatch(path.name)
        if not match or not (_is_dead(int(match[3]), match[4]) or _age(path) > _OLD):
            continue
        if match[2] == "replaced":
            _settle(path, folder / match[1])
        else:
            shutil.rmtree(path, ignore_errors=True)


def _settle(aside: Path, target: Path) -> None:
    """Delete a checkpoint that was set aside if another took its place, else put it back."""
    if not target.exists():
        try:
            os.rename(aside, target)
            return
        except OSError as error:
            if error.errno not in _TAKEN:
                return  # it stays, and counts as the checkpoint of its step
    shutil.rmtree(aside, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _leftover(target: Path, role: str) -> Path:
    match = _LEFTOVER.fullmatch(target.name)
    step = match[1] if match else target.name
    return target.with_name(f".{step}.{role}.{os.getpid()}.{uuid.uuid4().hex[:8]}.{_host()}")


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", platform.node())[:64] or "host"


def _is_dead(pid: int, host: str) -> bool:
    """Whether the process is known to be gone; unknown (another machine) is no."""
    if host != _host():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


def _age(path: Path) -> float:
    """Seconds since something in a folder was last written or renamed."""
    last = 0.0
    for entry in [path, *_entries(path)]:
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            last = max(last, status.st_mtime, status.st_ctime)
    return time.time() - last if last else 0.0
