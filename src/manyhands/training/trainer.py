"""The base class of all trainers: their options, their settings and their run folders."""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from manyhands.errors import BadSettings
from manyhands.placement.moves import Placement
from manyhands.training import devices as device_choice
from manyhands.training import launcher, options, refusals, schedules, stopping
from manyhands.training.callbacks import builtin
from manyhands.training.callbacks import callback as callback_plans
from manyhands.training.callbacks.callback import Callback
from manyhands.training.callbacks.loggers import Logger
from manyhands.training.checkpoints.run_folder import RunPlan, checkpoint_to_resume, plan_run
from manyhands.training.data import loader_batches, roles
from manyhands.training.data.loader_batches import as_number, first_batches
from manyhands.training.evaluation.evaluating import Evaluating
from manyhands.training.loss import own_step
from manyhands.training.options import ENDLESS, BatchStats, Checkpoints, Limits, Precision, Settings, Step, Workers
from manyhands.training.result import Result
from manyhands.training.schedules import Schedule

if TYPE_CHECKING:
    from manyhands.training.callbacks.events import Dispatcher
    from manyhands.training.learner import Learner
    from manyhands.training.loop import Loop

DEFAULT_BATCH = 256


class BaseTrainer(Evaluating):
    """Trains a model on one or more devices; the update is the one that a single device would make.

    ``Trainer(max_epochs=10, num_gpus=2, lr=0.1).fit(model, data)``. Its first three arguments may be given by
    position, all others by name.

    Args:
        max_epochs: How many times to go through the training data. Default: None, 10 times; if ``limits`` has steps
            or time, as often as these allow.
        num_gpus: How many GPUs to train on, at most; 0 is the CPU. Default: None, every GPU there is, else the CPU.
        gradient_clip_val: The largest global norm of the gradients; 0 does not clip. Default: 0.
        devices: The devices to train on: ``"gpu"`` (all GPUs, else the CPU; also ``"auto"`` and ``-1``), ``2`` (two
            GPUs; without a GPU two virtual CPU devices), ``"gpu:0"``, ``"cpu"``, ``"cpu:2"`` (two virtual CPU devices),
            or a list of names (``["gpu:0", "gpu:1"]``), of numbers of GPUs (``[0, 1]``) or of the framework's own
            objects. Default: None, as ``num_gpus`` says.
        batch_size: Samples per step, over all devices together. A loader has its own; another one here is an error.
            Default: None, the data's own, else 256.
        lr: The learning rate of an optimizer that the trainer creates; in JAX also a schedule of Optax. An optimizer
            object has its own: giving ``lr`` as well is an error. Default: None, the optimizer's own default; 0.1
            for SGD.
        loss: A name (``"mse"``, ``"mae"``, ``"huber"``, ``"cross_entropy"``, ``"bce_with_logits"``; in TensorFlow also
            any of Keras's), a function, an object, or a class that makes one. Called as the framework calls losses:
            ``loss(output, target)`` with PyTorch, JAX and MXNet, ``loss(y_true, y_pred)`` with Keras. It returns the
            mean over the samples of a batch, or one number per sample, or an ``mh.LossSum``.
            Of several numbers per sample, shape (n, k), the sum counts (in Keras the mean, as in ``model.fit``).
            Default: None, the model's own (``training_step``, or what a Keras model was compiled with), else
            cross-entropy.
        metrics: Further metrics of the validation data, by name (``{"mae": mae}``) or in a list: functions
            ``f(outputs, targets)`` that give a number, or the framework's metric objects (torchmetrics,
            ``keras.metrics``, ``mx.metric``). Each is computed over every sample exactly once, on any number of
            devices; its name in the rows is ``val_<name>``. Default: None, loss and (for classes) accuracy alone.
        optimizer: A name (``"adamw"``), a class (``torch.optim.AdamW``, ``keras.optimizers.Adam``), a function that
            takes a rate (``optax.adamw``) or an optimizer object. A model with ``configure_optimizers`` chooses its
            own: giving one here as well is an error. Default: None, the model's own (that, or what a Keras model was
            compiled with), else SGD.
        schedule: A function of how much of the training is done (0 to 1) that returns a factor of the learning rate,
            as ``mh.one_cycle``; ``mh.by_step(function)`` takes the number of the step instead. In PyTorch also a
            scheduler, its class, or a function that makes one from an optimizer. It is stepped after every epoch
            (``OneCycleLR`` and ``CyclicLR`` after every step), or as ``mh.PerStep(StepLR, step_size=100)`` or
            ``mh.PerEpoch(...)`` says.
            Default: None, a constant rate.
        precision: The number format of the layers: ``"fp32"``, ``"bf16"`` or in PyTorch ``"fp16"`` (weights stay
            float32; with fp16 the loss is scaled), ``"fp64"``. Default: ``"auto"``, decided by the hardware and the
            model, never by a measurement.
        seed: Sets the order of the samples and the random numbers of the job. Default: 0.
        run: A folder for metrics, checkpoints and a picture of the curves. Default: None, nothing is written.
        resume: Continue from a run's last checkpoint: ``"auto"`` from the one in ``run`` if there is one, or the folder
            of a run or checkpoint. Default: None, start a new run.
        quiet: Show no progress. Default: False.
        callbacks: Code that is called at certain moments: ``[mh.EarlyStopping("val_loss", patience=3)]``. See
            ``help(mh.Callback)`` for the moments. Default: none.
        loggers: Where metrics are written besides the run's own files:
            ``[mh.loggers.CSVLogger(every=50)]``. Default: none.
        step: How a step is run, and how its batch is divided: ``mh.Step(accumulate=4)``. See ``help(mh.Step)``.
        checkpoints: When checkpoints are written: ``mh.Checkpoints(every=100)``. See ``help(mh.Checkpoints)``.
        workers: The worker processes, in PyTorch: ``mh.Workers(hang_seconds=300)``. See ``help(mh.Workers)``.
        limits: Where training ends, and when to evaluate: ``mh.Limits(max_steps=1000)``. See ``help(mh.Limits)``.
    """

    # Each framework sets its adapter, and a table of the options, or values of them ("precision='fp16'"), that it does
    # not have: why, and what to write instead. All others it honours.
    backend: ClassVar[Any]
    refused: ClassVar[dict[str, str]] = {}
    takes_schedulers: ClassVar[bool] = False  # PyTorch's, as mh.PerStep(...)
    default_batch_stats: ClassVar[BatchStats] = "per_device"
    loss_kinds: ClassVar[tuple[type, ...]] = ()  # of losses, besides functions
    losses_by_name: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    searches_batch_size: ClassVar[bool] = False

    @refusals.explain_mistakes(too_many="Trainer takes max_epochs, num_gpus and gradient_clip_val; all others by name")
    def __init__(
        self,
        max_epochs: int | None = None,
        num_gpus: int | None = None,
        gradient_clip_val: float = 0,
        *,
        devices: str | int | Sequence[Any] | None = None,
        batch_size: int | None = None,
        lr: float | Callable[[Any], Any] | None = None,
        loss: Any = None,
        metrics: Any = None,
        optimizer: Any = None,
        schedule: Schedule | None = None,
        precision: Precision = "auto",
        seed: int = 0,
        run: str | Path | None = None,
        resume: str | Path | Literal["auto"] | None = None,
        quiet: bool = False,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
        step: Step = Step(),
        checkpoints: Checkpoints = Checkpoints(),
        workers: Workers = Workers(),
        limits: Limits = Limits(),
    ) -> None:
        self._keep({name: value for name, value in locals().items() if name in _DEFAULTS})
        self.max_epochs = self._resolved_epochs(max_epochs)
        self._check_topics()
        if devices is not None:
            choice = device_choice.resolve(devices, self.backend, self._virtual_cpus)
            vars(self).update(choice.options, devices=choice.devices)
            self._device_note = choice.note
        self.loss = own_step.resolve_loss(loss, self.losses_by_name, self.loss_kinds)
        self.schedule = self._as_schedule(schedule)
        schedules.check_option(self.schedule, schedulers=self.takes_schedulers)
        self._check_options()
        self._metrics()
        self._check_settings()
        if num_gpus is not None and (isinstance(num_gpus, bool) or not isinstance(num_gpus, Integral) or num_gpus < 0):
            raise BadSettings(f"num_gpus={num_gpus!r}: give a whole number, 0 for the CPU")
        if devices is None:
            available = self.backend.num_gpus()
            wanted = available if num_gpus is None else num_gpus
            self.gpus = [self.backend.gpu(i) for i in range(min(wanted, available))]
            self._device_note = device_choice.missing_gpus(wanted, available)
            return
        self.gpus = [native for native in self._natives() if self.backend.neutral(native).kind != "cpu"]
        if num_gpus not in (None, 0, len(self.gpus)):
            raise BadSettings(f"num_gpus={num_gpus} and devices={devices!r}: give one of the two options")

    def _as_schedule(self, schedule: Any) -> Any:
        """The schedule, where the framework has other forms of it."""
        return schedule

    def _virtual_cpus(self, count: int) -> dict[str, Any]:
        """The trainer's options for so many virtual CPU devices."""
        return device_choice.on_virtual_devices(self.backend, count)

    # A subclass may have an __init__ of its own, with the first three arguments and self.gpus; the rest needs no more.

    gpus: list[Any]
    result: Result | None = None
    _device_note: str | None = None

    loss: Any
    max_epochs: int | None

    def _resolved_epochs(self, epochs: int | None) -> int | None:
        """The number of epochs; None where limits end the job."""
        limits = self.options.limits
        return 10 if epochs is None and not (isinstance(limits, Limits) and limits.ends_training) else epochs

    def _check_topics(self) -> None:
        """Refuse values that are not option objects, and options that the framework does not have."""
        topics = {topic: getattr(self.options, topic) for topic in options.TOPICS}
        for topic, chosen in topics.items():
            options.check_topic(topic, chosen)
        for refused, reason in self.refused.items():
            name, _, text = refused.partition("=")
            place = next((topic for topic in topics.values() if hasattr(topic, name)), self)
            default = _DEFAULTS[name] if place is self else getattr(type(place)(), name)
            value = getattr(place, name)
            if (repr(value) == text) if text else (value != default):
                raise BadSettings(f"{options.as_written(place, name)}: {reason}")

    def _check_settings(self) -> None:
        """Refuse settings that are wrong for any model and data."""
        self._settings_with(self.options.batch_size)
        callback_plans.plan_of(self._callbacks(), has_run=self.options.run is not None)
        for name in ("run", "resume"):
            path = getattr(self.options, name)
            if path is not None and not isinstance(path, (str, os.PathLike)):
                raise BadSettings(f"{name}={path!r}: give the path of a folder")
        if self.options.resume == "auto" and self.options.run is None:
            raise BadSettings("resume='auto' continues the run in run=...: give run, or a run's folder as resume")
        if self.options.checkpoints.every is not None and self.options.run is None:
            every = options.as_written(self.options.checkpoints, "every")
            raise BadSettings(f"{every} without a folder for the checkpoints: give run=, as run='runs/mine'")

    def _check_options(self) -> None:
        """Refuse options that a framework cannot take; called by ``__init__``."""

    def _keep(self, arguments: dict[str, Any]) -> None:
        """Keep the arguments of ``__init__``, each as an attribute."""
        vars(self).update(arguments)

    @property
    def options(self) -> SimpleNamespace:
        """The values of all options by name, the defaults of those that a subclass's own ``__init__`` does not have."""
        return SimpleNamespace(**{name: vars(self).get(name, default) for name, default in _DEFAULTS.items()})

    def _natives(self) -> list[Any]:
        """The devices that are trained on, as the framework knows them."""
        devices = self.options.devices
        if devices is not None:
            return Placement(self.backend).distinct(devices)
        return list(self.gpus) or [self.backend.cpu()]

    @property
    def device_names(self) -> list[str]:
        """The names of the devices, as every framework prints them."""
        devices = self.options.devices
        return Placement(self.backend).names((self.gpus or ["cpu"]) if devices is None else devices)

    # Training

    @refusals.explain_mistakes(too_many="fit takes a model, its training data and its validation data, each (X, y)")
    def fit(self, model: Any, data: Any, validation: Any = None) -> Result:
        """Train the model in place and return a :class:`Result` (also ``trainer.result``).

        ``trainer.fit(model, train, validation)``. Both are (X, y) arrays, a data set or a loader of the framework, or
        a function that makes the batches of an epoch, ``batches()`` or ``batches(epoch)``. Without validation data
        only the training metrics are known. They may also be given as one: ``fit(model, (train, validation))``, or an
        object with ``train_dataloader`` and ``val_dataloader``.
        """
        from manyhands.training.callbacks.events import Dispatcher

        roles.check_order("fit", model, data)
        self._check_step(model)
        self.train_source, self.test_source = self._sources(data, validation)
        if self.options.metrics is not None and self.test_source is None:
            raise BadSettings("metrics= are computed over validation data: give some, fit(model, train, validation)")
        settings = self._settings()
        if self.train_source.count is None and self.train_source.batch_size is None:
            self.train_source = dataclasses.replace(self.train_source, required_size=self.options.batch_size)
        self._limit_data(settings)
        self._check_monitors(model)
        run, resume = plan_run(self.options.run, self.options.resume, self.run_config), None
        if launcher.is_first():
            if run is not None:
                run.check()
            resume = checkpoint_to_resume(self.options.resume, run)  # it is sent to the other processes
        title = self.run_config.get("train", {}).get("model") or type(model).__name__
        first, path = launcher.is_first(), None if run is None else run.path
        quiet = self.options.quiet or not first
        called = Dispatcher(self._callbacks(), settings, path, quiet=quiet, first=first, title=title)
        called.training.validates = self.test_source is not None
        called.notes += [] if self._device_note is None else [self._device_note]
        with stopping.record_signals(), called as dispatcher:
            result = self._train(model, settings, dispatcher, run=run, resume=resume)
            result.run = str(run.path) if run else None
            self.result = result
            dispatcher.end(result)
        if result.signal is not None:
            raise stopping.Stopped.by(result)
        return result

    # The largest batch

    @refusals.explain_mistakes(too_many="find_batch_size takes a model and its training data; all others by name")
    def find_batch_size(
        self,
        model: Any,
        data: Any,
        *,
        maximum: int | None = None,
        of: Literal["batch", "micro_batch"] = "batch",
    ) -> int:
        """The largest ``batch_size`` that fits into memory, over all of the trainer's devices; within an eighth of it.

        A few steps are made with larger and larger batches, on copies: the model and its optimizer stay as they are.
        PyTorch and JAX only.

        Args:
            model: As for ``fit``.
            data: As for ``fit``, but not a loader.
            maximum: The largest batch to try; on a CPU, where no error says that memory is full, it is needed.
                Default: None, all samples.
            of: ``"micro_batch"`` finds the largest ``Step(micro_batch_size=...)`` for the trainer's ``batch_size``.
        """
        self.train_source, self.test_source = self._sources(data)
        from manyhands.training import batch_size_search

        return batch_size_search.find(self, model, maximum, of)

    def _trial(self) -> AbstractContextManager[None]:
        """Within it a trial is made."""
        return contextlib.nullcontext()

    def _copies_of(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Copies to make steps with."""
        return copy.deepcopy((model, optimizer))

    def _is_out_of_memory(self, error: Exception) -> bool:
        """Whether a framework's error says that a device has no memory left."""
        return False

    def _loop(self, learner: Learner, model: Any, settings: Settings, dispatcher: Dispatcher, **files: Any) -> Loop:
        """The loop of a learner in this process; ``files``: the run's folder, and the checkpoint to resume."""
        from manyhands.training.loop import Loop

        options: dict[str, Any] = {"schedule": self.options.schedule, "metrics": self._metrics(model), **files}
        return Loop(learner, settings, dispatcher.event, callbacks=dispatcher.plan, **options)

    def _check_monitors(self, model: Any) -> None:
        """Refuse callbacks that follow a metric that there will not be."""
        if self._may_log(model):
            return
        callbacks, metrics = self._callbacks(), self._metrics(model).names
        rates = any(callback.wants_rates for callback in callbacks)
        known = builtin.known_metrics(metrics, validates=self.test_source is not None, rates=rates)
        for each in callbacks:
            if each.monitored and not builtin.is_known(each.monitored, known):
                missing = builtin.missing_metric(each.monitored, known)
                raise BadSettings(f"{type(each).__name__}({each.monitored!r}): {missing}")

    def _may_log(self, model: Any) -> bool:
        """Whether the model may log metrics of its own."""
        return False

    def _callbacks(self) -> list[Callback]:
        """The user's callbacks and loggers, checked."""
        return [
            *callback_plans.check_callbacks("callbacks", self._resolved_callbacks(self.options.callbacks), Callback),
            *callback_plans.check_callbacks("loggers", self.options.loggers, Logger),
        ]

    def _resolved_callbacks(self, callbacks: Any) -> Any:
        """The callbacks, with the framework's own kinds turned into ours."""
        return callbacks

    def _limit_data(self, settings: Settings) -> None:
        """Refuse data that cannot be read once per epoch; limit the validation data."""
        epochs = 1 if self.options.resume is not None else settings.max_epochs
        limits = settings.limits
        endless = limits.ends_training and limits.limit_batches is None and limits.overfit_batches is None
        loader_batches.check(self.train_source, epochs, may_be_endless=endless)
        loader_batches.check(self.test_source, epochs, may_be_endless=limits.limit_val_batches is not None)
        option = "Limits(limit_val_batches)"
        self.test_source = first_batches(self.test_source, limits.limit_val_batches, settings.batch_size, option)

    # Further entries of the run's config.json, besides the settings.
    run_config: Mapping[str, Any] = MappingProxyType({})

    @abc.abstractmethod
    def _train(
        self, model: Any, settings: Settings, dispatcher: Dispatcher, *, run: RunPlan | None, resume: Path | None
    ) -> Result:
        """Train on the devices; the result's ``devices`` are named."""

    train_source: Any
    test_source: Any

    def _settings(self) -> Settings:
        size, of_data = self.options.batch_size, self.train_source.batch_size
        if size is not None and of_data is not None and size != of_data:
            raise loader_batches.another_size(size, of_data)
        unknown = size is None and of_data is None and self.train_source.count is None
        if unknown and self.options.step.micro_batch_size is not None:
            raise BadSettings("micro_batch_size: the loader does not say how large its batches are: give batch_size=")
        settings = self._settings_with(of_data if size is None else size)
        step = settings.step.in_micro_batches(settings.batch_size, launcher.size() or len(self._natives()))
        limit, option = settings.limits.limit_batches, "Limits(limit_batches)"
        most = as_number(limit, self.train_source, settings.batch_size, option)
        return dataclasses.replace(settings, step=step, limits=dataclasses.replace(settings.limits, limit_batches=most))

    def _settings_with(self, size: int | None) -> Settings:
        names = {field.name for field in dataclasses.fields(Settings)} - {"batch_size"}
        chosen = {name: getattr(self.options, name) for name in names}
        if (step := chosen["step"]).batch_stats is None:
            in_parts = step.accumulate > 1 or step.micro_batch_size is not None
            whole = self.default_batch_stats == "global" and not in_parts
            chosen["step"] = dataclasses.replace(step, batch_stats="global" if whole else "per_device")
        if chosen["max_epochs"] is None:
            chosen["max_epochs"] = self._resolved_epochs(None) or ENDLESS
        return Settings(batch_size=DEFAULT_BATCH if size is None else size, **chosen)


# The defaults of this __init__; a subclass may have another one.
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(BaseTrainer.__init__).parameters.items()
    if name != "self"
}
