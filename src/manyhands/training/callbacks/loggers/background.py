"""A background thread that writes: the training does not wait for a disk or a network.

Work is done in order. If the disk is full there is a warning, and the training continues. Any other error is raised
when the next work is handed over.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import warnings
from collections.abc import Callable

Work = Callable[[], None]


class Background:
    """One thread and its queue."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._refused = False
        # A daemon: a program that ends without closing it does not hang.
        self._thread = threading.Thread(target=self._run, name=f"manyhands-{name}", daemon=True)
        self._thread.start()

    def hand_over(self, work: Work) -> None:
        """Have it done soon."""
        self._raise()
        self._work.put(work)

    def drain(self) -> None:
        """Return when all that was handed over is done."""
        done = threading.Event()
        self._work.put(done.set)
        while not done.wait(1) and self._thread.is_alive():
            pass
        self._raise()

    def close(self) -> None:
        """Do what is left, and end the thread."""
        self._work.put(None)
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
                self._refused = False
            except OSError as error:
                self._warn(error)
            except Exception as error:
                self._error = self._error or error

    def _warn(self, error: OSError) -> None:
        if not self._refused:  # once, until it works again
            self._refused = True
            with contextlib.suppress(Warning):  # where warnings are errors: this thread has no caller to raise them to
                warnings.warn(
                    f"{self._name} could not write: {error.strerror or error}. Training continues", stacklevel=2
                )
