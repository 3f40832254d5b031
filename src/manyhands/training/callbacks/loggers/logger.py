"""``Logger``: the callback that writes figures somewhere. Derive from it for another destination."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from manyhands.errors import BadSettings, PackageMissing
from manyhands.training.callbacks.callback import Callback, Row, Training, Values
from manyhands.training.callbacks.loggers.background import Background

# What of a row is no figure.
NO_FIGURES = ("epoch", "step", "whole")


class Logger(Callback):
    """Writes figures: the row of every epoch, and with ``every`` also the means over that many steps.

    Your own logger overrides :meth:`write_row` and :meth:`write_steps`, and if need be :meth:`open`,
    :meth:`flush` and :meth:`close`. These five are called in order, in a separate thread: a slow disk or network
    keeps no step waiting. Before each checkpoint all figures up to it are written.

    Args:
        every: Steps between two figures of steps. Default: None, only those of epochs.
    """

    def __init__(self, every: int | None = None) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise BadSettings(f"{type(self).__name__}(every={every!r}): give a number of steps of at least 1, or None")
        self.every = every
        self._background: Background | None = None
        self._is_open = False

    def open(self, training: Training, step: int | None) -> None:
        """Before the first figures; where the job was resumed, ``step`` is the last one that counts, else None."""

    def write_row(self, epoch: int, step: int, figures: dict[str, Any]) -> None:
        """The figures of an epoch, or since the last row: as ``result.rows`` has them."""

    def write_steps(self, epoch: int, step: int, figures: dict[str, float]) -> None:
        """The means over the last ``every`` steps."""

    def flush(self) -> None:
        """Bring everything that was written to where a kill does not lose it."""

    def close(self) -> None:
        """The training is over."""

    # Events

    def on_fit_start(self, training: Training) -> None:
        self._training, self._step = training, training.step if training.resumed else None
        self._is_open = False
        self._background = Background(type(self).__name__)

    def on_steps(self, training: Training, figures: Values) -> None:
        self._hand_over(self.write_steps, training, figures)

    def on_epoch_end(self, training: Training, row: Row) -> None:
        self.on_row(training, row)

    def on_row(self, training: Training, row: Row) -> None:
        """A row within an epoch."""
        figures = {name: value for name, value in row.items() if name not in NO_FIGURES and value is not None}
        self._hand_over(self.write_row, training, figures)

    def on_fit_end(self, training: Training) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.hand_over(self._end)
            background.close()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """Called for a checkpoint: figures before it are not logged again, so they have to be written first."""
        if self._background is not None:
            self._background.drain()
            if self._is_open:
                self._background.hand_over(self.flush)
                self._background.drain()
        return self.saved_state()

    def saved_state(self) -> dict[str, Any]:
        """The state of this logger that a checkpoint keeps, as JSON."""
        return {}

    def _hand_over(self, write: Any, training: Training, figures: dict[str, Any]) -> None:
        assert self._background is not None
        epoch, step, values = training.epoch, training.step, dict(figures)
        self._background.hand_over(lambda: self._write(write, epoch, step, values))

    def _write(self, write: Any, *values: Any) -> None:
        if not self._is_open:  # not before there is something: a job that is refused leaves no trace
            self.open(self._training, self._step)
            self._is_open = True
        write(*values)

    # For subclasses

    def folder(self, training: Training, chosen: Path | None) -> Path:
        """The folder to write to: the user's, or the run's."""
        if chosen is not None:
            return chosen
        if training.run is None:
            raise BadSettings(f"{type(self).__name__} has no folder to write to: give Trainer(run=...), or folder=")
        return training.run


def package(name: str, who: str, pip: str) -> Any:
    """An optional package, imported when it is used first."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PackageMissing(f"{who} needs the package {pip}: pip install {pip} ({error})") from error
