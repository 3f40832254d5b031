"""Loggers write metrics somewhere, in a separate thread: ``Logger``, to derive from, and those of four formats.

``CSVLogger`` needs no package; TensorBoard, MLflow and Weights & Biases need one of their own each.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from manyhands import files
from manyhands.errors import BadSettings, PackageMissing
from manyhands.training.callbacks.callback import Callback, Row, Training, Values

__all__ = ["CSVLogger", "Logger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
_NOT_LOGGED = ("epoch", "step", "whole")  # of a row, as metrics


class Logger(Callback):
    """Writes metrics: the row of every epoch, and with ``every`` also the means over that many steps.

    Your own logger overrides :meth:`write_row` and :meth:`write_steps`, and if need be :meth:`open`,
    :meth:`flush` and :meth:`close`. These five are called in order, in a separate thread: a slow disk or network
    keeps no step waiting. Before each checkpoint all metrics up to it are written. If the disk is full there is a
    warning, and the training continues; any other error ends it.

    Args:
        every: Steps between two entries. Default: None, only those of epochs.
    """

    _thread: ThreadPoolExecutor | None = None  # while a training runs

    def __init__(self, every: int | None = None) -> None:
        self.every = every

    def open(self, training: Training, step: int | None) -> None:
        """Before the first metrics; where the job was resumed, ``step`` is the last one that counts, else None."""

    def write_row(self, epoch: int, step: int, metrics: dict[str, Any]) -> None:
        """The metrics of an epoch, or since the last row: as ``result.rows`` has them."""

    def write_steps(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        """The means over the last ``every`` steps."""

    def flush(self) -> None:
        """Bring everything that was written to where a kill does not lose it."""

    def close(self) -> None:
        """The training is over; not called where nothing was logged."""

    def saved_state(self) -> dict[str, Any]:
        """The state of this logger that a checkpoint keeps, as JSON."""
        return {}

    # Events

    def on_fit_start(self, training: Training) -> None:
        self._training, self._step = training, training.step if training.resumed else None
        self._is_open = self._has_warned = False
        self._error: Exception | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"manyhands-{type(self).__name__}")

    def on_steps(self, training: Training, metrics: Values) -> None:
        self._hand_over(self.write_steps, training.epoch, training.step, dict(metrics))

    def on_epoch_end(self, training: Training, row: Row) -> None:
        self.on_row(training, row)

    def on_row(self, training: Training, row: Row) -> None:
        """A row within an epoch."""
        metrics = {name: value for name, value in row.items() if name not in _NOT_LOGGED and value is not None}
        self._hand_over(self.write_row, training.epoch, training.step, metrics)

    def on_fit_end(self, training: Training) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.submit(self._run, self.close, (), False)
            thread.shutdown()
            self._raise()

    def state_dict(self) -> dict[str, Any]:
        """Called for a checkpoint: metrics before it are not logged again, so they have to be written first."""
        self._hand_over(self.flush, opens=False).result()
        self._raise()
        return self.saved_state()

    # The thread

    def _hand_over(self, work: Callable[..., None], *values: Any, opens: bool = True) -> Future[None]:
        """Have it done soon. An error is raised with the next work that is handed over."""
        self._raise()
        assert self._thread is not None
        return self._thread.submit(self._run, work, values, opens)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[..., None], values: Sequence[Any], opens: bool) -> None:
        try:
            if opens and not self._is_open:  # not before there is something: a job that is refused leaves no trace
                self.open(self._training, self._step)
                self._is_open = True
            if self._is_open:
                work(*values)
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:  # once, until it works again
                self._has_warned = True
                text = f"{type(self).__name__} could not write: {error.strerror or error}. Training continues"
                with contextlib.suppress(Warning):  # where warnings are errors: this thread has no caller for them
                    warnings.warn(text, stacklevel=2)
        except Exception as error:
            self._error = self._error or error

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


_FIRST = ["epoch", "step"]


class CSVLogger(Logger):
    """Write metrics as CSV: ``metrics.csv`` has a row per epoch, ``steps.csv`` one per ``every`` steps.

    Args:
        folder: Where to write. Default: None, the run's folder.
        every: Steps between two rows of ``steps.csv``. Default: None, there is none.
    """

    def __init__(self, folder: str | Path | None = None, *, every: int | None = None) -> None:
        super().__init__(every)
        self._folder = None if folder is None else Path(folder).expanduser()
        self._tables: dict[str, _Table] = {}

    def on_fit_start(self, training: Training) -> None:
        self.folder(training, self._folder)  # an error now, not in the first epoch's end
        # A checkpoint of an epoch's last step may be older than its row, which then comes again.
        self._last_row = training.rows[-1]["step"] if training.rows else 0
        super().on_fit_start(training)

    def open(self, training: Training, step: int | None) -> None:
        folder = self.folder(training, self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        last = {"metrics": None if step is None else self._last_row, "steps": step}
        self._tables = {name: _Table(folder / f"{name}.csv", until) for name, until in last.items()}

    def write_row(self, epoch: int, step: int, metrics: dict[str, Any]) -> None:
        self._tables["metrics"].add({"epoch": epoch, "step": step, **metrics})

    def write_steps(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        self._tables["steps"].add({"epoch": epoch, "step": step, **metrics})


class _Table:
    """One CSV file."""

    def __init__(self, path: Path, step: int | None) -> None:
        """``step``: of a table that is there, rows up to this step stay; None: none do."""
        self._path = path
        self._columns: list[str] = []
        self._may_be_torn = False
        if step is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            self._columns, rows = self._read()
            self._replace([row for row in rows if int(row["step"]) <= step])

    def add(self, row: dict[str, Any]) -> None:
        if self._may_be_torn or not set(row) <= set(self._columns):
            rows = self._read()[1] if self._path.exists() else []
            self._columns += [name for name in row if name not in self._columns]
            self._replace([*rows, row])
            return
        self._may_be_torn = True  # until this line is whole: the disk may be full
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            self._writer(file).writerow(row)
        self._may_be_torn = False

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, restval="", lineterminator="\n")

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Columns and rows, without a last row that a kill cut short."""
        text = self._path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        columns = list(reader.fieldnames or _FIRST)
        if columns[:2] != _FIRST:
            raise BadSettings(f"{self._path} is not a table of CSVLogger: its columns are {', '.join(columns)}")
        return columns, list(reader)

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = self._writer(text)
        writer.writeheader()
        writer.writerows(rows)
        files.replace(self._path, text.getvalue().encode())
        self._may_be_torn = False


class _Series(Logger):
    """Metrics by name and step; those of steps are in a separate group."""

    def write_row(self, epoch: int, step: int, metrics: dict[str, Any]) -> None:
        self._log(step, {"epoch": epoch, **metrics})

    def write_steps(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        self._log(step, {f"step/{name}": value for name, value in metrics.items()})

    def _log(self, step: int, metrics: dict[str, Any]) -> None:
        raise NotImplementedError


class TensorBoardLogger(_Series):
    """Write metrics for TensorBoard: ``tensorboard --logdir runs`` shows them.

    Metrics of epochs have the names of ``result.rows`` (``train_loss``, ``val_acc``), those of steps are in a
    separate group (``step/train_loss``). Needs ``pip install tensorboardX``.

    Args:
        folder: Where to write. Default: None, the folder ``tensorboard`` of the run.
        every: Steps between two entries. Default: None, only those of epochs.
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

    def _log(self, step: int, metrics: dict[str, Any]) -> None:
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        values = [{"tag": name, "simple_value": float(value)} for name, value in numbers.items()]
        self._event(step, summary={"value": values})

    def _event(self, step: int, **content: Any) -> None:
        from tensorboardX.proto import event_pb2

        self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=step, **content))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Service(_Series):
    """A service that has one run per job; a resumed job continues it, by the id that the checkpoint keeps."""

    _id: str | None = None
    _own_id: str | None = None  # the user's

    def on_fit_start(self, training: Training) -> None:
        if not training.resumed:
            self._id = self._own_id
        super().on_fit_start(training)

    def saved_state(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]


class MLflowLogger(_Service):
    """Send metrics to MLflow.

    Metrics of epochs have the names of ``result.rows``, those of steps are in a separate group
    (``step/train_loss``). A resumed job continues the same run there. Needs ``pip install mlflow``.

    Args:
        experiment: The experiment there. Default: None, MLflow's own default.
        name: The run's name there. Default: None, the name of the run's folder.
        tracking_uri: The server, or a folder. Default: None, what ``MLFLOW_TRACKING_URI`` says.
        every: Steps between two entries. Default: None, only those of epochs.
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
        self._client: Any = None

    def on_fit_start(self, training: Training) -> None:
        self._mlflow = package("mlflow", "MLflowLogger", "mlflow")
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

    def _log(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._client.log_metric(self._id, name, float(value), step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED" if self._training.error is None else "FAILED")


class WandbLogger(_Service):
    """Send metrics to Weights & Biases; ``WANDB_MODE=offline`` keeps them on this machine.

    Metrics of epochs have the names of ``result.rows``, those of steps are in a separate group
    (``step/train_loss``). A resumed job continues the same run there. Needs ``pip install wandb``.

    Args:
        project: The project there. Default: None, W&B's own default.
        name: The run's name there. Default: None, the name of the run's folder.
        every: Steps between two entries. Default: None, only those of epochs.
        options: All others are options of ``wandb.init``: ``entity``, ``tags``, ``config``, ``mode``.
    """

    def __init__(
        self, project: str | None = None, name: str | None = None, *, every: int | None = None, **options: Any
    ) -> None:
        super().__init__(every)
        self._options = {"project": project, "name": name, **options}
        self._own_id = options.get("id")
        self._run: Any = None

    def on_fit_start(self, training: Training) -> None:
        self._wandb = package("wandb", "WandbLogger", "wandb")
        super().on_fit_start(training)

    def open(self, training: Training, step: int | None) -> None:
        options = {**self._options, **({} if self._id is None else {"id": self._id, "resume": "allow"})}
        if options["name"] is None and training.run is not None:
            options["name"] = training.run.name
        options.setdefault("dir", None if training.run is None else str(training.run))
        self._run = self._wandb.init(**options)
        self._id = self._run.id
        # Steps are a number of ours: W&B's own counter only goes up, and a resumed job makes some steps again.
        self._run.define_metric("*", step_metric="trainer_step")

    def _log(self, step: int, metrics: dict[str, Any]) -> None:
        self._run.log({"trainer_step": step, **metrics})

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._training.error is None else 1)
