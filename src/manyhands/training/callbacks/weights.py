"""Callbacks about the weights and their learning rate: ``EMA`` and ``LearningRateMonitor``."""

from __future__ import annotations

from typing import ClassVar

from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import Averaging, Callback, Row, Training, Values
from manyhands.training.options import is_from_zero


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

    def on_steps(self, training: Training, figures: Values) -> None:
        self._note(training.step, figures)

    def on_epoch_end(self, training: Training, row: Row) -> None:
        self._note(training.step, row)

    def _note(self, step: int, figures: Row) -> None:
        if rates := {name: value for name, value in figures.items() if name == "lr" or name.startswith("lr_")}:
            self.rates[step] = rates
