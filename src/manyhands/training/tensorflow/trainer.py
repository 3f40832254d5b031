"""``Trainer``: any Keras model, any loss, any optimizer, any data, on every device; and the book's ``train``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras
import tensorflow as tf

from manyhands.backends.tensorflow import devices as backend
from manyhands.errors import BadSettings, WorkerFailed
from manyhands.training import launcher
from manyhands.training.callbacks.events import Dispatcher
from manyhands.training.checkpoints.run_folder import RunPlan
from manyhands.training.data.roles import ModelInputs
from manyhands.training.data.sources import Source, Structure, is_dataset, source
from manyhands.training.evaluation.metrics import MetricCalls, Metrics
from manyhands.training.options import Settings
from manyhands.training.result import Result
from manyhands.training.tensorflow import checks, evaluation, losses, optimizers, world
from manyhands.training.tensorflow.dataset import repeatable
from manyhands.training.tensorflow.evaluation import Evaluation
from manyhands.training.tensorflow.keras_callbacks import KerasCallback, adapt
from manyhands.training.tensorflow.learner import Job, KerasLearner
from manyhands.training.tensorflow.model import apply_changes, of_batch_stats, of_precision
from manyhands.training.tensorflow.objective import inputs_for, objective_for
from manyhands.training.trainer import BaseTrainer

_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError, tf.errors.CancelledError)


class Trainer(BaseTrainer):
    __doc__ = BaseTrainer.__doc__

    backend: ClassVar[Any] = backend
    # The names that all frameworks have and Keras does not; Keras's own names need no entry.
    losses_by_name: ClassVar[Mapping[str, Any]] = {
        "cross_entropy": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "bce_with_logits": keras.losses.BinaryCrossentropy(from_logits=True),
        "l1": "mean_absolute_error",
    }
    loss_kinds: ClassVar[tuple[type, ...]] = (str, dict, list, tuple)  # names, and losses of several outputs
    refused: ClassVar[dict[str, str]] = {
        "precision='fp16'": "its gradients underflow without loss scaling, which is PyTorch's alone here; give 'bf16'",
        "shard": "FSDP2 is PyTorch's; TensorFlow's replicas hold all weights",
        "activation_checkpointing": "set it in the layers: build the model in a keras.RematScope",
        "per_device": "TensorFlow's replicas share one process: mh.virtual_devices(n) makes virtual CPU devices",
        "hang_seconds": "TensorFlow's replicas share one process, there are no workers to watch",
        "optimize": "a step in TensorFlow is always one graph, whose work TensorFlow orders itself; to see its values, "
        "write tf.print",
        "wrt": "set it in the model: layer.trainable = False freezes its weights",
        "shares='measured'": "TensorFlow does not time devices one by one; give one number per device",
    }

    def _check_options(self) -> None:
        optimizers.OPTIMIZERS.check(self.options.optimizer, self.options.lr)
        losses.check(self.options.loss)
        world.read_tf_config()
        if launcher.size() > 1:  # now: TensorFlow sets up a job of several processes before its first tensor or never
            devices = self.options.devices
            world.join(on_cpu=devices is not None and all("cpu" in str(device).lower() for device in devices))

    def _source(self, data: Any, *, shuffle: bool) -> Source:
        batches = self.options.limits.batches if shuffle else None
        return source(repeatable(data, self.options.seed, batches), shuffle=shuffle, structure=Structure())

    def _is_one_data_set(self, data: Any) -> bool:
        return is_dataset(data)

    def _train(
        self, model: Any, settings: Settings, dispatcher: Dispatcher, *, run: RunPlan | None, resume: Path | None
    ) -> Result:
        here = world.join() if launcher.size() > 1 else world.of_devices(self._natives())
        settings.check_devices(here.replicas)
        job = self._job(model, settings)
        changes = of_precision(model, settings.precision) + of_batch_stats(model, settings.step.batch_stats)
        with apply_changes(changes), _explain_errors(here):
            if here.replicas > 1 or settings.step.accumulate > 1:
                job.notes += checks.check_loss(model, job.objective, job.train)
            learner = KerasLearner(job, here)
            learner.callbacks = [callback for callback in dispatcher.callbacks if isinstance(callback, KerasCallback)]
            for callback in learner.callbacks:
                callback.of_model(model, learner.update_caller_model)
            result = self._loop(learner, model, settings, dispatcher, run=run, resume=resume).fit()
        if job.optimizer.use_ema:  # as Keras's fit does at its end
            job.optimizer.finalize_variable_values(model.trainable_variables)
        kind = backend.neutral(here.devices[0]).kind
        result.devices = launcher.device_names(kind) if here.size > 1 else self.device_names
        return result

    def _job(self, model: Any, settings: Settings) -> Job:
        checks.check_model(model)
        checks.check_compiled(model, loss=self.options.loss, tests=self.test_source is not None)
        checks.materialise(model, self.train_source)
        optimizer = optimizers.optimizer_for(self.options.optimizer, model, settings.lr)
        if self.options.schedule is not None and not hasattr(optimizer.learning_rate, "assign"):
            raise BadSettings("the optimizer has a LearningRateSchedule, the trainer schedule=: keep one of them")
        objective = objective_for(model, self.options.loss)
        labels = checks.check_labels(model, objective, self.train_source, self.test_source)
        return Job(model, objective, optimizer, self.train_source, self.test_source, settings, labels)

    def _inputs_of(self, model: Any, targets: bool | None) -> ModelInputs:
        checks.check_model(model)
        return inputs_for(model, targets)

    @contextlib.contextmanager
    def _evaluation_of(self, model: Any, source: Source, settings: Settings, *, tests: bool) -> Iterator[Evaluation]:
        checks.check_model(model)
        if tests:
            checks.check_compiled(model, loss=self.options.loss, tests=True)
        if not model.built:
            raise BadSettings("the model has no variables yet: call it on a few samples first, or model.build(shape)")
        here = world.join() if launcher.size() > 1 else world.of_devices(self._natives())
        objective = objective_for(model, self.options.loss)
        with apply_changes(of_precision(model, settings.precision)):
            labels = checks.check_labels(model, objective, source) if tests else None
            yield evaluation.apart(model, objective, source, here, settings, labels)

    def _resolved_callbacks(self, callbacks: Any) -> Any:
        return adapt(callbacks)

    def _metrics(self, model: Any = None) -> Metrics:
        return evaluation.with_compiled(super()._metrics(), model)

    def _own_meter(self, metric: Any) -> MetricCalls | None:
        return evaluation.own_meter(metric)


@contextlib.contextmanager
def _explain_errors(here: world.World) -> Iterator[None]:
    """Turn an error about a process that is gone into one that says so."""
    try:
        yield
    except _LOST as error:
        if here.size == 1:
            raise
        raise WorkerFailed(f"process {here.rank} lost another one, which died or hangs: {error.message}") from error
