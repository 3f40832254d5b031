"""The store of checkpoints: each is complete on disk, or absent.

A checkpoint is a folder ``step-00000123`` with ``state.json`` and one ``<name>.safetensors`` per blob.
It is written under another name, synced, and renamed; only then are older ones deleted. So a kill at
any moment leaves whole checkpoints, and at most a leftover that the next `save` clears away.

``state.json`` holds the format's version, the step, the caller's state, each blob's file, size and
SHA-256, and a SHA-256 of all that. Nothing is ever unpickled.
"""

from __future__ import annotations

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

from manyhands.amounts import counted
from manyhands.errors import (
    BadCheckpoint,
    CheckpointDamaged,
    CheckpointNotWritten,
    NoCheckpoint,
    NotJson,
    type_in_words,
)
from manyhands.training.checkpoints import atomic_files
from manyhands.training.checkpoints import folder as checkpoint_folder

FORMAT = 1

_STATE = "state.json"
_LARGEST_STATE = 64 * 2**20  # bytes; a larger one is not read into memory
_BLOB = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, read and checked."""

    path: Path
    state: dict[str, Any]
    blobs: dict[str, bytes]
    step: int


def save(
    folder: Path, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes], *, keep: int | None = 3
) -> Path:
    """Write the checkpoint of a step, then delete all but the last `keep` up to this step (None: delete none).

    A disk that refuses is `CheckpointNotWritten`: nothing of the new checkpoint stays, and the older
    ones do. Checkpoints of later steps are left alone; see `drop_after`.
    """
    _check_arguments(step, blobs, keep)
    folder = Path(folder)
    target = checkpoint_folder.path_of(folder, step)
    files = {_file_of(name): blob for name, blob in blobs.items()}
    files[_STATE] = _state_text(step, dict(state), blobs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint_folder.sweep(folder)
        _write(files, target, step)
    except OSError as error:
        refused = CheckpointNotWritten(
            f"the checkpoint of step {step} could not be written to {folder}: {error.strerror or error}. "
            f"{_what_is_left(folder)} Make room, or choose another folder."
        )
        refused.errno = error.errno
        raise refused from error
    upto = [path for other, path in checkpoint_folder.checkpoints(folder) if other <= step]
    for path in upto[keep:] if keep is not None else ():
        checkpoint_folder.delete(path)
    return target


def load(path: Path) -> Checkpoint:
    """Read one checkpoint, or the newest whole one of a folder, with a warning for each newer one that is damaged."""
    path = Path(path)
    if path.is_dir() and (checkpoint_folder.step_of(path) is not None or (path / _STATE).exists()):
        return _read(path)
    return _read_newest(path)


def amend(path: Path, **changes: Any) -> None:
    """Change entries of a checkpoint's state atomically; its blobs stay. Does nothing if there is no checkpoint."""
    try:
        content = _read_state(path / _STATE)
        if any(content["state"].get(name) != value for name, value in changes.items()):
            content["state"].update(changes)
            text = atomic_files.exact_json({**content, "sha256": _digest(content)}, _STATE, indent=1)
            atomic_files.replace(path / _STATE, text.encode())
    except (CheckpointDamaged, OSError):
        return


def latest(folder: Path) -> Path | None:
    """The checkpoint of the highest step, by its name alone: only `load` checks the contents."""
    return next((path for _, path in checkpoint_folder.checkpoints(Path(folder))), None)


def drop_after(folder: Path, step: int) -> None:
    """Delete the checkpoints of later steps: for a run that resumes from an earlier one."""
    for other, path in checkpoint_folder.checkpoints(Path(folder)):
        if other > step:
            checkpoint_folder.delete(path)


def _what_is_left(folder: Path) -> str:
    newest = latest(folder)
    if newest is None:
        return "There is no older one."
    return f"The last one left is of step {checkpoint_folder.step_of(newest)}."


def _check_arguments(step: int, blobs: Mapping[str, bytes], keep: int | None) -> None:
    if type(step) is not int or not 0 <= step < 10**18:
        raise BadCheckpoint(f"step={step!r} is not a step: give an integer of at least 0.")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise BadCheckpoint(f"keep={keep!r} would delete the checkpoint just written: keep at least 1.")
    for name, blob in blobs.items():
        if not isinstance(name, str) or not _BLOB.fullmatch(name):
            raise BadCheckpoint(f"a blob's name becomes a file's: letters, digits and _ . - only, not {name!r}.")
        if not isinstance(blob, bytes):
            raise BadCheckpoint(f"the blob {name!r} is {type_in_words(blob)}: serialise it to safetensors bytes first.")
    if len({name.casefold() for name in blobs}) < len(blobs):
        raise BadCheckpoint(f"two blobs differ only by capital letters, and so may be one file: {sorted(blobs)}.")


def _state_text(step: int, state: dict[str, Any], blobs: Mapping[str, bytes]) -> bytes:
    atomic_files.exact_json(state, "state")
    described = {
        name: {"file": _file_of(name), "size": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
        for name, blob in blobs.items()
    }
    content = {"format": FORMAT, "step": step, "state": state, "blobs": described}
    text = atomic_files.exact_json({**content, "sha256": _digest(content)}, _STATE, indent=1).encode()
    if len(text) > _LARGEST_STATE:
        raise NotJson(f"the state is {len(text)} bytes of JSON, more than {_LARGEST_STATE}: save arrays as blobs.")
    return text


def _digest(content: dict[str, Any]) -> str:
    """Of the values in state.json, not of its text, so that it can stand in the same file."""
    return hashlib.sha256(atomic_files.exact_json(content, _STATE).encode()).hexdigest()


def _file_of(name: str) -> str:
    return f"{name}.safetensors"


def _write(files: Mapping[str, bytes], target: Path, step: int) -> None:
    temporary = checkpoint_folder.temporary(target.parent, step)
    try:
        for name, data in files.items():
            atomic_files.write(temporary / name, data)
        atomic_files.sync_folder(temporary)
        checkpoint_folder.put_in_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_newest(folder: Path) -> Checkpoint:
    damaged: list[CheckpointDamaged] = []
    for _, path in checkpoint_folder.checkpoints(folder):
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
    raise NoCheckpoint(
        f"there is no checkpoint in {folder}. A checkpoint is a folder named step-00000123; "
        "give one of them, or the folder that holds them."
    )


def _read(path: Path) -> Checkpoint:
    content = _read_state(path / _STATE)
    step = content["step"]
    if checkpoint_folder.step_of(path) not in (None, step):
        raise CheckpointDamaged(f"{path / _STATE} is of step {step}, which contradicts the folder's name.")
    blobs = {}
    for name, entry in content["blobs"].items():
        file = path / _file_of(name)
        data = _read_file(file, entry["size"])
        if len(data) != entry["size"]:
            raise CheckpointDamaged(
                f"{file} has {counted(len(data), 'byte')} instead of {entry['size']:,}: it is truncated."
            )
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise CheckpointDamaged(f"{file} has changed since it was written: its SHA-256 differs.")
        blobs[name] = data
    return Checkpoint(path=path, state=content["state"], blobs=blobs, step=step)


def _read_state(file: Path) -> dict[str, Any]:
    try:
        content = atomic_files.read_json(_read_file(file, _LARGEST_STATE))
    except ValueError as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged(f"{file} is not JSON: {error}.") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointDamaged(f"{file} is not the state of a checkpoint: it has no format version.")
    version = content["format"]
    if type(version) is not int or version != FORMAT:
        raise CheckpointDamaged(
            f"{file} has format {version!r}; this version of manyhands reads format {FORMAT}. "
            "Load it with the version that wrote it."
        )
    digest = content.pop("sha256", None)
    try:
        whole = digest == _digest(content)
    except NotJson:  # a number such as 1e999 reads as infinite
        whole = False
    if not whole or not _is_well_formed(content):
        raise CheckpointDamaged(f"{file} has changed since it was written: its SHA-256 differs.")
    return content


def _is_well_formed(content: dict[str, Any]) -> bool:
    """Whether state.json has all its parts: a digest is no secret, so anybody can write one that fits."""
    state, step, blobs = content.get("state"), content.get("step"), content.get("blobs")
    if type(step) is not int or not isinstance(state, dict) or not isinstance(blobs, dict):
        return False
    return all(
        _BLOB.fullmatch(name)
        and isinstance(entry, dict)
        and entry.get("file") == _file_of(name)
        and type(entry.get("size")) is int
        for name, entry in blobs.items()
    )


def _read_file(file: Path, size: int) -> bytes:
    """The bytes of a regular file of at most `size`: anything else is not opened, for it could block or be endless."""
    try:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointDamaged(f"{file} is not a file.")
        if status.st_size > size:
            raise CheckpointDamaged(
                f"{file} has {counted(status.st_size, 'byte')}, more than the {size:,} it may have."
            )
        return file.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{file} is missing.") from error
    except OSError as error:
        raise CheckpointDamaged(f"{file} cannot be read: {error.strerror or error}.") from error
