"""Loggers for TensorBoard, MLflow and Weights & Biases; each needs a package of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from manyhands.training.callbacks.callback import Training
from manyhands.training.callbacks.logger import Logger, package


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


class MLflowLogger(Logger):
    """Send figures to MLflow.

    Figures of epochs have the names of ``result.rows``, those of steps are in a separate group
    (``step/train_loss``). A resumed job continues the same run there. Needs ``pip install mlflow``.

    Args:
        experiment: The experiment there. Default: None, MLflow's own default.
        name: The run's name there. Default: None, the name of the run's folder.
        tracking_uri: The server, or a folder. Default: None, what ``MLFLOW_TRACKING_URI`` says.
        every: Steps between two figures of steps. Default: None, only those of epochs.
    """

    def __init__(
        self,
        experiment: str | None = None,
        name: str | None = None,
        *,
        tracking_uri: str | None = None,
        every: int | None = None,
    ) -> None:
        super().__init__(every)
        self._experiment, self._name, self._uri = experiment, name, tracking_uri
        self._id: str | None = None
        self._client: Any = None

    def on_fit_start(self, training: Training) -> None:
        self._mlflow = package("mlflow", "MLflowLogger", "mlflow")
        if not training.resumed:
            self._id = None
        super().on_fit_start(training)

    def open(self, training: Training, step: int | None) -> None:
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        if self._id is not None:
            self._client.update_run(self._id, status="RUNNING")
            return
        name = self._name or (None if training.run is None else training.run.name)
        self._id = self._client.create_run(self._experiment_id(), run_name=name).info.run_id

    def _experiment_id(self) -> str:
        name = self._experiment or "Default"
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known is not None else self._client.create_experiment(name))

    def write_row(self, epoch: int, step: int, figures: dict[str, Any]) -> None:
        self._log(step, {"epoch": epoch, **figures})

    def write_steps(self, epoch: int, step: int, figures: dict[str, float]) -> None:
        self._log(step, {f"step/{name}": value for name, value in figures.items()})

    def _log(self, step: int, figures: dict[str, Any]) -> None:
        for name, value in figures.items():
            if isinstance(value, (int, float)):
                self._client.log_metric(self._id, name, float(value), step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED" if self._training.error is None else "FAILED")

    def saved_state(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]


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
