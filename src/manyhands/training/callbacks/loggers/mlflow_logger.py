"""``MLflowLogger``: figures for MLflow."""

from __future__ import annotations

from typing import Any

from manyhands.training.callbacks.callback import Training
from manyhands.training.callbacks.loggers.logger import Logger, package


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
