"""The callbacks that come with manyhands: two that follow a metric, an average of the weights, learning rates.

A checkpoint that is no longer among the best is deleted before the better one is written: a job that is killed there
comes to the same evaluation again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from manyhands.amounts import count_of
from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import NO_METRICS, Averaging, Callback, Row, Training, Values
from manyhands.training.checkpoints import store
from manyhands.training.options import check_count, is_from_zero

Mode = Literal["min", "max"]
_SINGLE = ("train_loss", "train_acc", "val_loss", "val_acc")


class Monitored(Callback):
    """A callback that follows one metric: ``val_...`` after each evaluation, others at the end of each epoch."""

    _kept: ClassVar[tuple[str, ...]]  # the attributes that a checkpoint keeps

    def __init__(self, monitor: str, mode: Mode | None) -> None:
        self._who = f"{type(self).__name__}({monitor!r})"
        if not isinstance(monitor, str) or not monitor:
            raise BadSettings(f"{self._who}: give the name of a metric, as 'val_loss'")
        if mode not in ("min", "max", None):
            raise BadSettings(f"{self._who}(mode={mode!r}): choose one of min, max")
        self._name = self.monitored = monitor
        self._mode: Mode = mode or ("max" if monitor.endswith(("_acc", "_accuracy")) else "min")
        self._is_of_evaluations = monitor.startswith("val_")  # a model may log it there by any name
        self._evaluated = False  # yet

    def _look(self, training: Training, value: float) -> None:
        """The metric has a new value."""
        raise NotImplementedError

    def on_evaluation(self, training: Training, metrics: Values) -> None:
        self._evaluated = True
        if self._name in metrics:
            self._is_of_evaluations = True
            self._look(training, metrics[self._name])
        elif self._is_of_evaluations:
            raise self._unknown_metric(metrics)

    def on_epoch_end(self, training: Training, row: Row) -> None:
        if self._is_of_evaluations:
            return
        known = [name for name in row if name not in NO_METRICS and row[name] is not None]
        if self._name in known:
            self._look(training, float(row[self._name]))
        elif self._evaluated or not training.validates:  # else the first evaluation comes later
            raise self._unknown_metric(known)

    def _unknown_metric(self, names: Iterable[str]) -> BadSettings:
        return BadSettings(f"{self._who}: {missing_metric(self._name, sorted(names))}")

    def _is_better(self, value: float, than: float | None, min_delta: float = 0.0) -> bool:
        """NaN is never better; a number is better than none. What is not one number cannot be compared."""
        if not isinstance(value, (int, float)):
            raise several_values(self._who, self._name, value)
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value < than - min_delta if self._mode == "min" else value > than + min_delta

    def state_dict(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in self._kept}
        return {"monitor": self._name, "mode": self._mode, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue; a job that follows another metric than before starts anew."""
        if (state["monitor"], state["mode"]) == (self._name, self._mode):
            vars(self).update({name: state[name] for name in self._kept})


def several_values(who: str, name: str, value: object) -> BadSettings:
    """The error for a metric that is followed and is not one number."""
    return BadSettings(
        f"{who}: {name!r} has several values ({value}), which are not better or worse than others: let the metric "
        f"return one number, or a dict of names and numbers, of which each is a metric ({name}_<key>)"
    )


def known_metrics(metrics: Iterable[str], *, validates: bool, rates: bool) -> list[str]:
    """The names of all metrics that a training may have: accuracies are there where targets are classes."""
    tested = [f"val_{name}" for name in ("loss", "acc", *metrics)] if validates else []
    return sorted(["train_loss", "train_acc", *tested, *(["lr"] if rates else [])])


def is_known(name: str, known: Iterable[str]) -> bool:
    """Whether a metric of this name may come; a metric (or the rates) may have several values, each with its name."""
    return any(name == each or (each not in _SINGLE and name.startswith(f"{each}_")) for each in known)


def missing_metric(name: str, known: Sequence[str]) -> str:
    """That there is no such metric, and which there are, in words."""
    validates = "val_loss" in known or not name.startswith("val_")
    missing = "" if validates else ", because there are no validation data: give some"
    return f"there is no metric {name!r}{missing}. There are {', '.join(known)}"


class EarlyStopping(Monitored):
    """End the training when a metric has not improved for some evaluations.

    ``Trainer(max_epochs=100, callbacks=[mh.EarlyStopping("val_loss", patience=3)])``. ``result.stopped`` says so.

    Args:
        monitor: The metric to follow: ``val_loss``, ``val_acc``, your own metric (``val_f1``), ``train_loss``.
        patience: How many evaluations in a row (for metrics of the training: epochs) may bring no improvement.
            Default: 3.
        mode: ``"min"``: less is better, ``"max"``: more is. Default: None, ``"max"`` for accuracies, else ``"min"``.
        min_delta: An improvement is a change by more than this. Default: 0.
    """

    _kept = ("best", "best_epoch", "waited")

    def __init__(self, monitor: str, patience: int = 3, mode: Mode | None = None, min_delta: float = 0.0) -> None:
        super().__init__(monitor, mode)
        check_count(patience, f"EarlyStopping(patience={patience!r})")
        if not is_from_zero(min_delta):
            raise BadSettings(f"EarlyStopping(min_delta={min_delta!r}): give a number of zero or more")
        self.patience, self.min_delta = patience, float(min_delta)
        self.state_key = monitor
        self.best: float | None = None
        self.best_epoch: int | None = None
        self.waited = 0  # evaluations since the best one

    def on_fit_start(self, training: Training) -> None:
        if training.resumed and self.waited >= self.patience:
            self._stop(training)
        elif not training.resumed:
            self.best, self.best_epoch, self.waited = None, None, 0

    def _look(self, training: Training, value: float) -> None:
        if self._is_better(value, self.best, self.min_delta):
            self.best, self.best_epoch, self.waited = value, training.epoch, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self._stop(training)

    def _stop(self, training: Training) -> None:
        best = "it was NaN" if self.best is None else f"the best was {self.best:.6g} in epoch {self.best_epoch}"
        waited = count_of(self.waited, "evaluation" if self._is_of_evaluations else "epoch")
        training.stop(f"{self._name} has not improved for {waited}; {best}", by="early stopping")


_REGULAR = "checkpoints"


class BestCheckpoint(Monitored):
    """Keep the checkpoints with the best metrics in the folder ``best`` of the run.

    ``best = mh.BestCheckpoint("val_acc", save_top_k=2)``; after ``fit``, ``mh.load_weights(model, best.best_path)``.

    Args:
        monitor: The metric to follow: ``val_loss``, ``val_acc``, your own metric (``val_f1``), ``train_loss``.
        mode: ``"min"``: less is better, ``"max"``: more is. Default: None, ``"max"`` for accuracies, else ``"min"``.
        save_top_k: How many to keep. Default: 1.
        folder: The folder in the run. Two of these in one training need different ones. Default: ``"best"``.
    """

    _kept = ("_best",)

    def __init__(self, monitor: str, mode: Mode | None = None, save_top_k: int = 1, folder: str = "best") -> None:
        super().__init__(monitor, mode)
        check_count(save_top_k, f"BestCheckpoint(save_top_k={save_top_k!r})")
        if not isinstance(folder, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", folder):
            raise BadSettings(f"BestCheckpoint(folder={folder!r}): give the name of a folder, as 'best'")
        if folder == _REGULAR:
            raise BadSettings(f"BestCheckpoint(folder={folder!r}): the newest checkpoints are there; give another name")
        self.save_top_k, self.folder, self.saves_to = save_top_k, folder, folder
        self.state_key = folder
        self._path: Path | None = None
        self._best: list[list[Any]] = []  # value and step, the best first

    @property
    def best_value(self) -> float | None:
        """The best value so far."""
        return self._best[0][0] if self._best else None

    @property
    def best_path(self) -> Path | None:
        """The checkpoint with the best value."""
        return None if self._path is None or not self._best else store.path_of(self._path, self._best[0][1])

    @property
    def best(self) -> dict[Path, float]:
        """All that are kept, the best first: their paths and values."""
        if self._path is None:
            return {}
        return {store.path_of(self._path, step): value for value, step in self._best}

    def on_fit_start(self, training: Training) -> None:
        assert training.run is not None
        self._path = training.run / self.folder
        if not training.resumed:
            self._best = []
        # A job that resumes in another folder, or from an older checkpoint, does not have all of them.
        steps = {step for step, _ in store.checkpoints(self._path)}
        self._best = [pair for pair in self._best if pair[1] in steps]

    def _look(self, training: Training, value: float) -> None:
        assert self._path is not None
        worst = self._best[-1][0] if len(self._best) == self.save_top_k else None
        if not self._is_better(value, worst):
            return
        ranked = [*(pair for pair in self._best if pair[1] != training.step), [value, training.step]]
        ranked.sort(key=lambda pair: pair[0], reverse=self._mode == "max")  # of equals the older one comes first
        self._best, dropped = ranked[: self.save_top_k], ranked[self.save_top_k :]
        for _, step in dropped:
            store.delete(store.path_of(self._path, step))
        training.save(self.folder)


class EMA(Callback):
    """Keep an exponential moving average of the weights, evaluate with it, and leave it in the model.

    ``Trainer(callbacks=[mh.EMA(0.999)])``. After each step every device computes
    ``average = decay * average + (1 - decay) * weights``, beginning with the weights at the start. Evaluations use the
    average, and after ``fit`` the model has it. Checkpoints hold both: training continues from the weights, and
    ``mh.load_weights`` gives the average. Where running statistics of BatchNorm are not averaged, they are the
    training's newest ones, as in PyTorch's ``AveragedModel``. To recompute them for the averaged weights, call
    ``torch.optim.swa_utils.update_bn(loader, model)`` after ``fit``.

    Args:
        decay: How much of the average stays in each step, between 0 and 1. Default: 0.999.
        use_buffers: Average the running statistics of BatchNorm, and what else a model keeps in floating point and
            does not train (PyTorch's buffers, Keras's non-trainable weights), in the same way. Default: False, they
            are the training's newest.
    """

    def __init__(self, decay: float = 0.999, use_buffers: bool = False) -> None:
        if not is_from_zero(decay) or not 0 < decay < 1:
            raise BadSettings(f"EMA(decay={decay!r}): give a number between 0 and 1, as 0.999")
        if not isinstance(use_buffers, bool):
            raise BadSettings(f"EMA(use_buffers={use_buffers!r}): give True or False")
        self.averaging = Averaging(float(decay), use_buffers)


class LearningRateMonitor(Callback):
    """Report the learning rate: ``lr`` in ``result.rows``, in ``metrics.jsonl`` and in every logger.

    It is the rate of an epoch's last step, and with ``every`` the rate of each of these steps. Optimizers with several
    groups of parameters also have ``lr_1``, ``lr_2`` and so on. Optax keeps rates inside functions: there it is known
    where the trainer makes the optimizer (``optimizer="adam", lr=0.01``) or with ``optax.inject_hyperparams``.

    Args:
        every: Steps between two rates in :attr:`rates`. Default: None, the end of each epoch.
    """

    wants_rates: ClassVar[bool] = True

    def __init__(self, every: int | None = None) -> None:
        self.every = every
        # The rates by step, since the trainer's last ``fit`` began.
        self.rates: dict[int, dict[str, float]] = {}

    def on_fit_start(self, training: Training) -> None:
        self.rates = {}

    def on_steps(self, training: Training, metrics: Values) -> None:
        self._note(training.step, metrics)

    def on_epoch_end(self, training: Training, row: Row) -> None:
        self._note(training.step, row)

    def _note(self, step: int, metrics: Row) -> None:
        if rates := {name: value for name, value in metrics.items() if name == "lr" or name.startswith("lr_")}:
            self.rates[step] = rates
