"""Keras's own callbacks in ``Trainer(callbacks=[keras.callbacks.EarlyStopping(...)])``.

Their moments of a training, an epoch and an evaluation are called as in ``model.fit``, with Keras's names of metrics.
At the end of an epoch the model has the weights of that moment, so that it can be saved. What is called at every batch
is refused, because its metrics would have to be waited for, and so is what writes to the optimizer, which is not the
one that trains. A checkpoint keeps the plain numbers of a callback and its lists of arrays (``wait``, ``best`` and
``best_weights`` of an EarlyStopping).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from manyhands.errors import BadSettings
from manyhands.training.callbacks.callback import NO_METRICS, Callback, Row, Training, Values
from manyhands.training.checkpoints import tensors

_OF_BATCHES = [name for name in dir(keras.callbacks.Callback) if "_batch_" in name and "predict" not in name]
_INSTEAD = {
    "LearningRateScheduler": "give the trainer schedule=, a function from how much of the training is done (0 to 1) to "
    "a factor of the rate, or the optimizer a keras.optimizers.schedules object",
    "ReduceLROnPlateau": "no rate follows a metric here. Give the trainer schedule=mh.one_cycle, or another function "
    "of how much of the training is done; keras.callbacks.EarlyStopping ends it at a plateau",
    "TensorBoard": "give the trainer loggers=[mh.loggers.TensorBoardLogger()]",
    "BackupAndRestore": "give the trainer run= and resume='auto'",
    "TerminateOnNaN": "the trainer stops at a loss that is NaN; step=mh.Step(on_nan='continue') goes on",
    "SwapEMAWeights": "give callbacks=[mh.EMA(0.999)]",
    "ProgbarLogger": "the trainer shows its progress itself",
}
_NAMES = {"train_loss": "loss", "train_acc": "accuracy", "val_acc": "val_accuracy"}
_PART = "callbacks"  # of a checkpoint


class KerasCallback(Callback):
    """A callback of Keras's, called at the trainer's moments."""

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        _check(callback)
        self.callback = callback
        self.state_key = type(callback).__name__
        self.update_caller_model: Callable[[], None] | None = None  # puts the weights of this moment into the model
        self.saved: dict[str, Any] = {}

    def of_model(self, model: Any, update_caller_model: Callable[[], None]) -> None:
        model.stop_training = False
        self.callback.set_model(model)
        self.update_caller_model = update_caller_model

    def on_fit_start(self, training: Training) -> None:
        self.callback.set_params({"verbose": 0, "epochs": training.max_epochs, "steps": training.batches})
        self.callback.on_train_begin({})
        for name, value in self.saved.items():  # Keras's own begin anew in on_train_begin
            setattr(self.callback, name, value)

    def on_epoch_start(self, training: Training) -> None:
        self.callback.on_epoch_begin(training.epoch - 1, {})

    def on_evaluation(self, training: Training, metrics: Values) -> None:
        self.callback.on_test_begin({})
        self.callback.on_test_end({name.removeprefix("val_"): value for name, value in _logs(metrics).items()})

    def on_epoch_end(self, training: Training, row: Row) -> None:
        if self.update_caller_model is not None:
            self.update_caller_model()
        self.callback.on_epoch_end(training.epoch - 1, _logs(row))
        if getattr(self.callback.model, "stop_training", False):
            training.stop(f"{type(self.callback).__name__} of Keras")

    def on_fit_end(self, training: Training) -> None:
        if training.error is None:
            self.callback.on_train_end(_logs(training.rows[-1]) if training.rows else {})

    def state_dict(self) -> dict[str, Any]:
        # min_delta is an option, whose sign Keras changes at the end of the first epoch.
        return {name: value for name, value in vars(self.callback).items() if _is_plain(value) and name != "min_delta"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved |= state


def adapt(values: Any) -> Any:
    """The same callbacks, with Keras's own as ours."""
    if isinstance(values, keras.callbacks.Callback):
        values = [values]
    if isinstance(values, (str, bytes, type)) or not hasattr(values, "__iter__"):
        return values
    return [KerasCallback(value) if isinstance(value, keras.callbacks.Callback) else value for value in values]


def _check(callback: keras.callbacks.Callback) -> None:
    name = type(callback).__name__
    if isinstance(callback, keras.callbacks.CallbackList):
        raise BadSettings("a CallbackList of Keras holds several: give them one by one, callbacks=[...]")
    if type(callback).__module__.startswith("keras.") and name in _INSTEAD:
        raise BadSettings(f"callbacks=[keras.callbacks.{name}(...)] is not for this trainer: {_INSTEAD[name]}")
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch":
        return
    plain = keras.callbacks.Callback
    for moment in _OF_BATCHES:
        if moment in vars(callback) or getattr(type(callback), moment) is not getattr(plain, moment):
            raise BadSettings(
                f"{name} has {moment}, which Keras calls with the metrics of every batch, and waiting for these would "
                "stall every step: derive a class from mh.Callback with every=100 and on_steps(training, metrics), "
                "which gets them late"
            )


def _logs(row: Row) -> dict[str, Any]:
    metrics = {name: value for name, value in row.items() if name not in NO_METRICS and value is not None}
    return {_NAMES.get(name, name): value for name, value in metrics.items()}


def pack(callbacks: Sequence[KerasCallback]) -> dict[str, bytes]:
    """The lists of arrays of all callbacks (``best_weights``), as a part of a checkpoint."""
    arrays = {
        f"{number}.{name}.{place:06}": array
        for number, callback in enumerate(callbacks)
        for name, several in vars(callback.callback).items()
        if isinstance(several, list) and all(isinstance(part, np.ndarray) for part in several)
        for place, array in enumerate(several)
    }
    return {_PART: tensors.pack(arrays)} if arrays else {}


def unpack(callbacks: Sequence[KerasCallback], parts: Mapping[str, bytes]) -> None:
    """Give the arrays of a checkpoint back to the callbacks."""
    for key, array in sorted(tensors.unpack(parts[_PART]).items()) if _PART in parts else ():
        number, name, _ = key.split(".")
        if int(number) < len(callbacks):
            callbacks[int(number)].saved.setdefault(name, []).append(array)


def _is_plain(value: Any) -> bool:
    return type(value) in (int, bool, str) or (type(value) is float and math.isfinite(value))
