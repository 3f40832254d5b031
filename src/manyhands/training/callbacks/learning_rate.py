"""``LearningRateMonitor``: the learning rate among the figures."""

from __future__ import annotations

from typing import ClassVar

from manyhands.training.callbacks.callback import Callback, Row, Training, Values


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
