"""``WandbLogger``: figures for Weights & Biases."""

from __future__ import annotations

from typing import Any

from manyhands.training.callbacks.callback import Training
from manyhands.training.callbacks.loggers.logger import Logger, package


class WandbLogger(Logger):
    """Send figures to Weights & Biases; ``WANDB_MODE=offline`` keeps them on this machine.

    Figures of epochs have the names of ``result.rows``, those of steps are in a separate group
    (``step/train_loss``). A resumed job continues the same run there. Needs ``pip install wandb``.

    Args:
        project: The project there. Default: None, W&B's own default.
        name: The run's name there. Default: None, the name of the run's folder.
        every: Steps between two figures of steps. Default: None, only those of epochs.
        options: All others are options of ``wandb.init``: ``entity``, ``tags``, ``config``, ``mode``.
    """

    def __init__(
        self, project: str | None = None, name: str | None = None, *, every: int | None = None, **options: Any
    ) -> None:
        super().__init__(every)
        self._options = {"project": project, "name": name, **options}
        self._id: str | None = options.get("id")
        self._run: Any = None

    def on_fit_start(self, training: Training) -> None:
        self._wandb = package("wandb", "WandbLogger", "wandb")
        if not training.resumed:
            self._id = self._options.get("id")
        super().on_fit_start(training)

    def open(self, training: Training, step: int | None) -> None:
        options = {**self._options, **({} if self._id is None else {"id": self._id, "resume": "allow"})}
        if options["name"] is None and training.run is not None:
            options["name"] = training.run.name
        options.setdefault("dir", None if training.run is None else str(training.run))
        self._run = self._wandb.init(**options)
        self._id = self._run.id
        # Steps are a figure of ours: W&B's own counter only goes up, and a resumed job makes some steps again.
        self._run.define_metric("*", step_metric="trainer_step")

    def write_row(self, epoch: int, step: int, figures: dict[str, Any]) -> None:
        self._run.log({"trainer_step": step, "epoch": epoch, **figures})

    def write_steps(self, epoch: int, step: int, figures: dict[str, float]) -> None:
        self._run.log({"trainer_step": step, **{f"step/{name}": value for name, value in figures.items()}})

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._training.error is None else 1)

    def saved_state(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]
