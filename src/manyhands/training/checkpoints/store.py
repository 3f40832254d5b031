"""The store of checkpoints: each is complete on disk, or absent.

A checkpoint is a folder, named after its step, with ``state.json`` and one ``<name>.safetensors`` per blob. Everything
else in the folder of checkpoints whose name begins with a dot is a leftover::

    step-00000100/
    step-00000200/
    .step-00000300.writing/     not whole yet
    .step-00000200.replaced/    an older step 200, until the new one is in place
    .step-00000001.deleted/     no longer wanted

A checkpoint is written under such a name, synced, and renamed; only then are older ones deleted. A folder cannot be
renamed over another one, so a step that exists is set aside first; should the writer die between the two renames, the
one set aside counts. So a kill at any moment leaves whole checkpoints, and at most leftovers, which the next `save`
clears away. One process at a time may write: the lock of a run's folder sees to that.

``state.json`` holds the format's version, the step, the caller's state, each blob's file, size and SHA-256, and a
SHA-256 of all that. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands import files
from manyhands.errors import CheckpointDamaged, CheckpointNotWritten, NoCheckpoint, NotJson

FORMAT = 1

_STATE = "state.json"
_LARGEST_STATE = 64 * 2**20  # bytes; a larger one is not read into memory
_BLOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_STEP = re.compile(r"step-([0-9]{8,18})")
_LEFTOVER = re.compile(r"\.(step-[0-9]{8,18})\.(writing|replaced|deleted)(\..*)?")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, read and checked."""

    path: Path
    state: dict[str, Any]
    blobs: dict[str, bytes]
    step: int


# The names in a folder of checkpoints


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
        # "." sorts first: of one step, the checkpoint in place overwrites one that is set aside.
        if step is not None and path.is_dir():
            by_step[step] = path
    return sorted(by_step.items(), reverse=True)


def latest(folder: Path) -> Path | None:
    """The checkpoint of the highest step, by its name alone: only `load` checks the contents."""
    return next((path for _, path in checkpoints(Path(folder))), None)


def delete(path: Path) -> None:
    """Delete a checkpoint, renaming it first: a half-deleted one never has its name."""
    doomed = _leftover(path, "deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def drop_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps: for a run that resumes from an earlier one."""
    for other, path in checkpoints(Path(folder)):
        if other > step:
            delete(path)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _leftover(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name.lstrip('.').partition('.')[0]}.{role}")


def _clear_leftovers(folder: Path) -> None:
    """Delete what a killed writer has left, and put back the checkpoint that it had set aside."""
    for path in _entries(folder):
        match = _LEFTOVER.fullmatch(path.name)
        if match and match[2] == "replaced" and not (folder / match[1]).exists():
            os.rename(path, folder / match[1])
        elif match:
            shutil.rmtree(path, ignore_errors=True)


# Writing


def save(
    folder: Path, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes], *, keep: int | None = 3
) -> Path:
    """Write the checkpoint of a step, then delete all but the last `keep` up to this step (None: delete none).

    A disk that refuses is `CheckpointNotWritten`: nothing of the new checkpoint stays, and the older
    ones do. Checkpoints of later steps are left alone; see `drop_after`.
    """
    folder = Path(folder)
    target = path_of(folder, step)
    contents = {_file_of(name): blob for name, blob in blobs.items()}
    contents[_STATE] = _state_text(step, dict(state), blobs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(folder)
        _write(contents, target)
    except OSError as error:
        newest = latest(folder)
        left = "There is no older one" if newest is None else f"The last one left is of step {step_of(newest)}"
        refused = CheckpointNotWritten(
            f"the checkpoint of step {step} could not be written to {folder}: {error.strerror or error}. "
            f"{left}. Make room, or choose another folder."
        )
        refused.errno = error.errno
        raise refused from error
    upto = [path for other, path in checkpoints(folder) if other <= step]
    for path in upto[keep:] if keep is not None else ():
        delete(path)
    return target


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, or the newest whole one of a folder, with a warning for each newer one that is damaged."""
    path = Path(path)
    if path.is_dir() and (step_of(path) is not None or (path / _STATE).exists()):
        return _read(path)
    return _read_newest(path)


def _state_text(step: int, state: dict[str, Any], blobs: Mapping[str, bytes]) -> bytes:
    files.exact_json(state, "state")
    described = {
        name: {"file": _file_of(name), "size": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
        for name, blob in blobs.items()
    }
    content = {"format": FORMAT, "step": step, "state": state, "blobs": described}
    text = files.exact_json({**content, "sha256": _digest(content)}, _STATE, indent=1).encode()
    if len(text) > _LARGEST_STATE:
        raise NotJson(f"the state is {len(text)} bytes of JSON, more than {_LARGEST_STATE}: save arrays as blobs.")
    return text


def _digest(content: dict[str, Any]) -> str:
    """Of the values in state.json, not of its text, so that it can stand in the same file."""
    return hashlib.sha256(files.exact_json(content, _STATE).encode()).hexdigest()


def _file_of(name: str) -> str:
    return f"{name}.safetensors"


def _write(contents: Mapping[str, bytes], target: Path) -> None:
    new, old = _leftover(target, "writing"), _leftover(target, "replaced")
    new.mkdir()
    try:
        for name, data in contents.items():
            files.write_new(new / name, data)
        files.sync_folder(new)
        if target.exists():
            os.rename(target, old)
        os.rename(new, target)
        files.sync_folder(target.parent)
    finally:
        if old.exists() and not target.exists():
            os.rename(old, target)
        for path in (new, old):
            shutil.rmtree(path, ignore_errors=True)


# Reading


def _read_newest(folder: Path) -> Checkpoint:
    damaged: list[CheckpointDamaged] = []
    for _, path in checkpoints(folder):
        try:
            checkpoint = _read(path)
        except CheckpointDamaged as error:
            if not path.exists():  # a writer at work deleted or replaced it meanwhile: look again
                return _read_newest(folder)
            damaged.append(error)
            continue
        for problem in damaged:
            warnings.warn(f"{problem} Going on from step {checkpoint.step} instead.", RuntimeWarning, stacklevel=3)
        return checkpoint
    if damaged:
        raise CheckpointDamaged(f"{damaged[0]} No other checkpoint in {folder} is intact.") from damaged[0]
    raise NoCheckpoint(f"there is no checkpoint in {folder}. A checkpoint is a folder named step-00000123.")


def _read(path: Path) -> Checkpoint:
    content = _read_state(path / _STATE)
    step, blobs = content["step"], {}
    if step_of(path) not in (None, step):
        raise CheckpointDamaged(f"{path / _STATE} is of step {step}, which contradicts the folder's name.")
    for name, entry in content["blobs"].items():
        file = path / _file_of(name)
        blobs[name] = _read_file(file, entry["size"])
        if hashlib.sha256(blobs[name]).hexdigest() != entry.get("sha256"):
            raise CheckpointDamaged(f"{file} was cut short or changed: its SHA-256 differs.")
    return Checkpoint(path=path, state=content["state"], blobs=blobs, step=step)


def _read_state(file: Path) -> dict[str, Any]:
    text = _read_file(file, _LARGEST_STATE)
    try:
        content = files.read_json(text)
        version, digest = content["format"], content.pop("sha256", None)
        is_whole = digest == _digest(content) and _is_well_formed(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointDamaged(f"{file} is not the state of a checkpoint: {type(error).__name__}, {error}.") from error
    if type(version) is not int or version != FORMAT:
        raise CheckpointDamaged(f"{file} has format {version!r}; this version of manyhands reads format {FORMAT}.")
    if not is_whole:
        raise CheckpointDamaged(f"{file} has changed since it was written: its SHA-256 differs.")
    return content  # type: ignore[no-any-return]


def _is_well_formed(content: dict[str, Any]) -> bool:
    """Whether state.json has all its parts: a digest is no secret, so anybody can write one that fits."""
    return (
        type(content["step"]) is int
        and isinstance(content["state"], dict)
        and all(_BLOB.fullmatch(name) and type(entry["size"]) is int for name, entry in content["blobs"].items())
    )


def _read_file(file: Path, size: int) -> bytes:
    """The bytes of a regular file of at most `size`: anything else is not opened, for it could block or be endless."""
    try:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointDamaged(f"{file} is not a file.")
        if status.st_size > size:
            raise CheckpointDamaged(f"{file} has {status.st_size:,} bytes, more than the {size:,} it may have.")
        return file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{file} is missing.") from error
    except OSError as error:
        raise CheckpointDamaged(f"{file} cannot be read: {error.strerror or error}.") from error
