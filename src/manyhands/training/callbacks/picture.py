"""``Picture``: the curves of a run, drawn into its folder; every training with ``run=`` has one."""

from __future__ import annotations

import time

from manyhands.training.callbacks.callback import Callback, Row, Training
from manyhands.training.checkpoints.run_folder import RunFolder
from manyhands.training.display import curves

_EVERY = 15.0  # seconds between two drawings: each takes a part of one


class Picture(Callback):
    """Draws ``curves.png``, from the first epoch on; a training is worth more than its picture, so nothing fails here.

    While the training runs it is drawn now and then between two epochs, and once more at the end.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._drawn, self._before = time.monotonic(), 0

    def on_fit_start(self, training: Training) -> None:
        self._drawn, self._before = time.monotonic(), len(training.rows)

    def on_epoch_end(self, training: Training, row: Row) -> None:
        if time.monotonic() - self._drawn > _EVERY:
            self._draw(training)

    def on_fit_end(self, training: Training) -> None:
        reason = self._draw(training)
        if reason is not None and training.result is not None:
            training.result.notes.append(f"no picture: {reason}")

    def _draw(self, training: Training) -> str | None:
        """Why there is no picture; None where there is one, or nothing new to draw."""
        if training.run is None or len(training.rows) == self._before:
            return None
        devices = [] if training.result is None else training.result.devices
        title = f"{self.title} on {', '.join(devices)}" if devices else self.title
        try:
            curves.curves(training.rows, RunFolder(training.run).plot_path, title=title)
        except Exception as error:  # whatever drawing raises
            return str(error)
        finally:
            self._drawn = time.monotonic()
        return None
