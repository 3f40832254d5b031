"""``EarlyStopping``: stop a training that no longer improves."""

from __future__ import annotations

from typing import Any

from manyhands.amounts import counted
from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Callback, Row, Training, Values
from manyhands.training.callbacks.monitor import Mode, Monitor
from manyhands.training.options import is_from_zero


class EarlyStopping(Callback):
    """End the training when a figure has not improved for some evaluations.

    ``Trainer(max_epochs=100, callbacks=[mh.EarlyStopping("val_loss", patience=3)])``. ``result.stopped`` says so.

    Args:
        monitor: The figure to follow: ``val_loss``, ``val_acc``, your own metric (``val_f1``), ``train_loss``.
        patience: How many evaluations in a row (for figures of the training: epochs) may bring no improvement.
            Default: 3.
        mode: ``"min"``: less is better, ``"max"``: more is. Default: None, ``"max"`` for accuracies, else ``"min"``.
        min_delta: An improvement is a change by more than this. Default: 0.
    """

    def __init__(self, monitor: str, patience: int = 3, mode: Mode | None = None, min_delta: float = 0.0) -> None:
        self._monitor = Monitor(monitor, mode, f"EarlyStopping({monitor!r})")
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise BadSettings(f"EarlyStopping(patience={patience!r}): give a whole number of at least 1")
        if not is_from_zero(min_delta):
            raise BadSettings(f"EarlyStopping(min_delta={min_delta!r}): give a number of zero or more")
        self.patience, self.min_delta = patience, float(min_delta)
        self.monitored = self.state_key = monitor
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.waited = 0  # evaluations since the best one

    def on_fit_start(self, training: Training) -> None:
        if training.resumed and self.waited >= self.patience:
            self._stop(training)
        elif not training.resumed:
            self.best, self.best_epoch, self.waited = None, None, 0

    def on_evaluation(self, training: Training, figures: Values) -> None:
        self._look(training, self._monitor.after_evaluation(figures))

    def on_epoch_end(self, training: Training, row: Row) -> None:
        self._look(training, self._monitor.at_epoch_end(row))

    def _look(self, training: Training, value: float | None) -> None:
        if value is None:
            return
        if self._monitor.is_better(value, self.best, self.min_delta):
            self.best, self.best_epoch, self.waited = value, training.epoch, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self._stop(training)

    def _stop(self, training: Training) -> None:
        best = "it was NaN" if self.best is None else f"the best was {self.best:.6g} in epoch {self.best_epoch}"
        waited = counted(self.waited, "evaluation" if self._monitor.is_of_evaluations else "epoch")
        training.stop(f"{self._monitor.name} has not improved for {waited}; {best}", by="early stopping")

    def state_dict(self) -> dict[str, Any]:
        watched = {"monitor": self._monitor.name, "mode": self._monitor.mode}
        return {"best": self.best, "best_epoch": self.best_epoch, "waited": self.waited, **watched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting; a job that follows another figure than before starts anew."""
        if (state["monitor"], state["mode"]) != (self._monitor.name, self._monitor.mode):
            return
        self.best, self.best_epoch, self.waited = state["best"], state["best_epoch"], state["waited"]
