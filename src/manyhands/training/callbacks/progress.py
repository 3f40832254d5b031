"""``Progress``: what a training shows while it runs; the one callback that is there by default."""

from __future__ import annotations

from manyhands.training.callbacks.callback import Callback, Row, Training, Values
from manyhands.training.display.display import Display


class Progress(Callback):
    """Shows how a training goes: a bar on a terminal, elsewhere one line per epoch.

    Every trainer has one. To show something else, derive a class from it and give that to the trainer, which then
    takes it instead: ``Trainer(callbacks=[MyProgress()])``. With ``quiet=True`` none is called.
    """

    _display: Display | None = None

    def on_fit_start(self, training: Training) -> None:
        self._display = Display(training.max_epochs, training.max_steps, quiet=False)
        self._display.__enter__()

    def on_progress(self, training: Training, figures: Values) -> None:
        event = {"kind": "progress", "epoch": training.epoch - 1, "step": training.step, "batches": training.batches}
        event["unit"] = training.unit
        self._show({**event, **{name: figures.get(name) for name in ("batch", "samples", "loss", "accuracy")}})

    def on_evaluation(self, training: Training, figures: Values) -> None:
        self._show({"kind": "evaluation", **figures})

    def on_epoch_end(self, training: Training, row: Row) -> None:
        self._show({"kind": "epoch", **row})

    def on_row(self, training: Training, row: Row) -> None:
        """A row of figures within an epoch, where ``Limits(evaluate_every="100 steps")`` asks for it."""
        self._show({"kind": "row", **row})

    def on_note(self, training: Training, text: str) -> None:
        """The job has something to say: where it resumes, why it stops."""
        self._show({"kind": "note", "text": text})

    def on_fit_end(self, training: Training) -> None:
        if self._display is not None:
            self._display.__exit__(None, None, None)
            self._display = None

    def _show(self, event: Row) -> None:
        if self._display is not None:
            self._display.event(event)
