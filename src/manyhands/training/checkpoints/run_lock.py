"""A lock on a run's folder: two jobs that write to one run would write every epoch twice.

The lock is the system's (``flock``) on the file ``job.lock``. It ends with the process that holds it, however that
process ends; the file itself says who holds it, and may stay behind after a kill. Readers need no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import weakref
from pathlib import Path

from manyhands.errors import RunInUse

NAME = "job.lock"
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)
_LONGEST = 300  # bytes of the file that are read


class RunLock:
    """The lock of one run's folder, held until `release`; ``note`` says why there is none on this file system."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.note: str | None = None
        self._descriptor: int | None = None
        while self._descriptor is None and self.note is None:
            self._try(folder)
        _held.add(self)

    def release(self) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()  # before the lock is released, so that no other job holds it yet
        self._forget()

    def _try(self, folder: Path) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_file_of(descriptor, self.path):  # its holder deleted it in this moment: take the new one
                os.close(descriptor)
                return
            os.ftruncate(descriptor, 0)
            with contextlib.suppress(OSError):  # a full disk: the run is locked, but the file does not name the holder
                os.write(descriptor, f"process {os.getpid()} on {platform.node() or 'this machine'}\n".encode())
        except OSError as error:
            holder = os.pread(descriptor, _LONGEST, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno in _HELD_BY_ANOTHER:
                raise RunInUse(
                    f"{folder} is in use: {holder or 'another process'} trains in it. Wait until it has ended, stop "
                    "it, or give another folder"
                ) from None
            with contextlib.suppress(OSError):
                self.path.unlink()
            why = error.strerror or str(error)
            self.note = f"{folder} could not be locked ({why}): make sure that no other job trains in it"
            return
        self._descriptor = descriptor

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _is_file_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock._forget()


# A forked child (a data loader's worker) would hold the lock with its parent, and keep it when the parent is killed.
os.register_at_fork(after_in_child=_forget_all)
