"""``TensorBoardLogger``: figures for TensorBoard, written by the package tensorboardX, which needs no framework."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from manyhands.training.callbacks.callback import Training
from manyhands.training.callbacks.loggers.logger import Logger, package


class TensorBoardLogger(Logger):
    """Write figures for TensorBoard: ``tensorboard --logdir runs`` shows them.

    Figures of epochs have the names of ``result.rows`` (``train_loss``, ``val_acc``), those of steps are in a
    separate group (``step/train_loss``). Needs ``pip install tensorboardX``.

    Args:
        folder: Where to write. Default: None, the folder ``tensorboard`` of the run.
        every: Steps between two figures of steps. Default: None, only those of epochs.
    """

    def __init__(self, folder: str | Path | None = None, *, every: int | None = None) -> None:
        super().__init__(every)
        self._folder = None if folder is None else Path(folder).expanduser()
        self._writer: Any = None

    def on_fit_start(self, training: Training) -> None:
        self.folder(training, self._folder)
        package("tensorboardX", "TensorBoardLogger", "tensorboardX")
        super().on_fit_start(training)

    def open(self, training: Training, step: int | None) -> None:
        from tensorboardX import event_file_writer

        folder = self._folder or self.folder(training, None) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # Not its SummaryWriter: that has a queue of its own, which a flush does not empty.
        self._writer = event_file_writer.EventsWriter(str(folder / "events"), "")
        if step is not None:  # TensorBoard leaves out what was written of later steps
            self._event(step + 1, session_log={"status": "START"})

    def write_row(self, epoch: int, step: int, figures: dict[str, Any]) -> None:
        self._scalars(step, {"epoch": epoch, **figures})

    def write_steps(self, epoch: int, step: int, figures: dict[str, float]) -> None:
        self._scalars(step, {f"step/{name}": value for name, value in figures.items()})

    def _scalars(self, step: int, figures: dict[str, Any]) -> None:
        numbers = {name: value for name, value in figures.items() if isinstance(value, (int, float))}
        values = [{"tag": name, "simple_value": float(value)} for name, value in numbers.items()]
        self._event(step, summary={"value": values})

    def _event(self, step: int, **content: Any) -> None:
        from tensorboardX.proto import event_pb2

        self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=step, **content))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
