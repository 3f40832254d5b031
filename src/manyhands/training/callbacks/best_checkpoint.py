"""``BestCheckpoint``: keep the checkpoints with the best figures, beside the newest ones.

A run with ``BestCheckpoint("val_acc", save_top_k=2)``::

    checkpoints/step-00000400/  step-00000500/     the newest ones
    best/step-00000300/  step-00000500/            the best ones

Both are whole checkpoints. A checkpoint that is no longer among the best is deleted after the next regular checkpoint,
which records that it is not needed. So a killed job finds all its best checkpoints, whichever one it resumes from.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Callback, Row, Training, Values
from manyhands.training.callbacks.monitor import Mode, Monitor
from manyhands.training.checkpoints import folder as checkpoint_folder

_REGULAR = "checkpoints"


class BestCheckpoint(Callback):
    """Keep the checkpoints with the best figures in the folder ``best`` of the run.

    ``best = mh.BestCheckpoint("val_acc", save_top_k=2)``; after ``fit``, ``mh.load_weights(model, best.best_path)``.

    Args:
        monitor: The figure to follow: ``val_loss``, ``val_acc``, your own metric (``val_f1``), ``train_loss``.
        mode: ``"min"``: less is better, ``"max"``: more is. Default: None, ``"max"`` for accuracies, else ``"min"``.
        save_top_k: How many to keep. Default: 1.
        folder: The folder in the run. Two of these in one training need different ones. Default: ``"best"``.
    """

    needs_run: ClassVar[bool] = True

    def __init__(self, monitor: str, mode: Mode | None = None, save_top_k: int = 1, folder: str = "best") -> None:
        self._monitor = Monitor(monitor, mode, f"BestCheckpoint({monitor!r})")
        if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < 1:
            raise BadSettings(f"BestCheckpoint(save_top_k={save_top_k!r}): give a whole number of at least 1")
        if not isinstance(folder, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", folder):
            raise BadSettings(f"BestCheckpoint(folder={folder!r}): give the name of a folder, as 'best'")
        if folder == _REGULAR:
            raise BadSettings(f"BestCheckpoint(folder={folder!r}): the newest checkpoints are there; give another name")
        self.save_top_k, self.folder = save_top_k, folder
        self.monitored, self.state_key = monitor, folder
        self._path: Path | None = None
        self._best: list[tuple[float, int]] = []  # value and step, the best first
        self._dropped: list[int] = []  # steps that are no longer among them, and may still be there

    @property
    def best_value(self) -> float | None:
        """The best figure so far."""
        return self._best[0][0] if self._best else None

    @property
    def best_path(self) -> Path | None:
        """The checkpoint with the best figure."""
        return None if self._path is None or not self._best else checkpoint_folder.path_of(self._path, self._best[0][1])

    @property
    def best(self) -> dict[Path, float]:
        """All that are kept, the best first: their paths and figures."""
        if self._path is None:
            return {}
        return {checkpoint_folder.path_of(self._path, step): value for value, step in self._best}

    def on_fit_start(self, training: Training) -> None:
        assert training.run is not None
        self._path = training.run / self.folder
        if not training.resumed:
            self._best, self._dropped = [], []
        # A job that resumes in another folder, or from an older checkpoint, does not have all of them.
        steps = {step for step, _ in checkpoint_folder.checkpoints(self._path)}
        self._best = [(value, step) for value, step in self._best if step in steps]

    def on_evaluation(self, training: Training, figures: Values) -> None:
        self._look(training, self._monitor.after_evaluation(figures))

    def on_epoch_end(self, training: Training, row: Row) -> None:
        self._look(training, self._monitor.at_epoch_end(row))

    def _look(self, training: Training, value: float | None) -> None:
        worst = self._best[-1][0] if len(self._best) == self.save_top_k else None
        if value is None or not self._monitor.is_better(value, worst):
            return
        ranked = [*((figure, step) for figure, step in self._best if step != training.step), (value, training.step)]
        ranked.sort(
            key=lambda pair: pair[0], reverse=self._monitor.mode == "max"
        )  # of equals the older one comes first
        self._best, dropped = ranked[: self.save_top_k], ranked[self.save_top_k :]
        self._dropped += [step for _, step in dropped]
        training.save(self.folder)

    def on_checkpoint(self, training: Training, path: Path) -> None:
        if path.parent.name != _REGULAR or self._path is None:
            return
        best_steps = {step for _, step in self._best}
        for step in self._dropped:
            if step not in best_steps:
                checkpoint_folder.delete(checkpoint_folder.path_of(self._path, step))
        self._dropped = []

    def state_dict(self) -> dict[str, Any]:
        watched = {"monitor": self._monitor.name, "mode": self._monitor.mode}
        return {"best": [list(pair) for pair in self._best], "dropped": list(self._dropped), **watched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the best so far. A job that follows another figure starts anew, and does not delete these."""
        if (state["monitor"], state["mode"]) != (self._monitor.name, self._monitor.mode):
            return
        self._best = [(value, step) for value, step in state["best"]]
        self._dropped = list(state["dropped"])
