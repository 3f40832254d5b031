"""``Trainer``: any Gluon model, any loss, any optimizer, any data, on every device; and the book's ``train``.

All devices are driven by the calling process: MXNet's engine runs them side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from mxnet import gluon

from manyhands.backends.mxnet import devices as backend
from manyhands.training.callbacks.events import Dispatcher
from manyhands.training.checkpoints.run_folder import RunPlan
from manyhands.training.data import sources
from manyhands.training.data.roles import ModelInputs, inputs_of
from manyhands.training.data.sources import Source
from manyhands.training.evaluation.metrics import MetricCalls
from manyhands.training.mxnet import checks, evaluation, optimizers, replicas
from manyhands.training.mxnet.evaluation import Evaluation
from manyhands.training.mxnet.learner import GluonLearner
from manyhands.training.mxnet.objective import objective_for
from manyhands.training.mxnet.step import Feed
from manyhands.training.options import Settings
from manyhands.training.result import Result
from manyhands.training.trainer import BaseTrainer


class Trainer(BaseTrainer):
    __doc__ = BaseTrainer.__doc__

    backend: ClassVar[Any] = backend
    losses_by_name: ClassVar[Mapping[str, Any]] = {
        "cross_entropy": gluon.loss.SoftmaxCrossEntropyLoss(),
        "mse": gluon.loss.L2Loss(weight=2.0),  # Gluon's own is half of the squared error
        "l1": gluon.loss.L1Loss(),
        "mae": gluon.loss.L1Loss(),
        "huber": gluon.loss.HuberLoss(),
        "bce_with_logits": gluon.loss.SigmoidBinaryCrossEntropyLoss(),
    }
    refused: ClassVar[dict[str, str]] = {
        "precision='fp16'": "its gradients underflow without loss scaling, which is PyTorch's alone here; give 'fp32'",
        "precision='bf16'": "MXNet 1.9 has no training in bfloat16; give 'fp32', or 'auto' for the model's own",
        "shard": "FSDP2 is PyTorch's; MXNet's replicas hold all weights",
        "activation_checkpointing": "MXNet decides itself: set MXNET_BACKWARD_DO_MIRROR=1 before it starts",
        "per_device": "MXNet drives all devices from one process: give more devices (mh.virtual_devices(2))",
        "hang_seconds": "MXNet drives all devices from one process, there are no workers to watch",
        "optimize": "MXNet's engine runs the operations of a step as they are written, in parallel where it can, and "
        "compiles a model where you ask it to: write net.hybridize() before",
        "wrt": "set it in the model: block.collect_params().setattr('grad_req', 'null') freezes its weights",
        "accumulate": "MXNet's trainer computes a batch in one pass; give a smaller batch_size",
        "micro_batch_size": "MXNet's trainer computes a batch in one pass; give a smaller batch_size",
        "batch_stats='global'": "MXNet's layers normalise over the samples of their own device; train on one device",
        "on_nan='continue'": "MXNet's trainer stops at a NaN; leave such samples out of the data",
        "shares='measured'": "MXNet's engine does not time devices one by one; give one number per device",
    }

    def _check_options(self) -> None:
        optimizers.OPTIMIZERS.check(self.options.optimizer, self.options.lr)

    def _source(self, data: Any, *, shuffle: bool) -> Source:
        if isinstance(data, gluon.data.ArrayDataset):
            data = tuple(map(sources.as_numpy, data._data))
        if isinstance(data, gluon.data.DataLoader):
            return sources.Stream(data, getattr(data._batch_sampler, "_batch_size", None))
        return sources.source(data, shuffle=shuffle)

    def _own_meter(self, metric: Any) -> MetricCalls | None:
        return evaluation.own_meter(metric)

    _join_arrays = staticmethod(backend.join)

    def _inputs_of(self, model: Any, targets: bool | None) -> ModelInputs:
        checks.check_block(model)
        return inputs_of(evaluation.call_of(model), type(model).__name__, targets)

    @contextlib.contextmanager
    def _evaluation_of(self, model: Any, source: Source, settings: Settings, *, tests: bool) -> Iterator[Evaluation]:
        checks.refuse_launcher()
        checks.check_values(model)
        objective, devices = objective_for(model, self.options.loss), self._natives()
        with replicas.on(model, devices, "float64" if settings.precision == "fp64" else None):
            look = checks.check_labels(objective, source) if tests else None
            yield Evaluation(objective, Feed(source, devices, replicas.distinct(model)[0].dtype, look=look), settings)

    def _train(
        self, model: Any, settings: Settings, dispatcher: Dispatcher, *, run: RunPlan | None, resume: Path | None
    ) -> Result:
        checks.refuse_launcher()
        devices = self._natives()
        settings.check_devices(len(devices))
        checks.check_model(model)
        train, test = self.train_source, self.test_source
        objective = objective_for(model, self.options.loss)
        with replicas.numpy_like(replicas.of_model(model)):
            checks.make_parameters(model, train, settings.seed)
            look = checks.check_labels(objective, train, test)
            notes = checks.check_loss(model, objective, train) if len(devices) > 1 else []
        schedule, optimizer = self.options.schedule, self.options.optimizer
        with replicas.on(model, devices, "float64" if settings.precision == "fp64" else None):
            trainer = optimizers.trainer_for(
                model, optimizer, settings.lr, scheduled=schedule is not None, devices=devices
            )
            learner = GluonLearner(model, trainer, objective, settings, train, test, devices, look)
            learner.notes += notes
            result = self._loop(learner, model, settings, dispatcher, run=run, resume=resume).fit()
        result.devices = self.device_names
        return result
