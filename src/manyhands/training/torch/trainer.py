"""``Trainer``: any module, any loss, any optimizer, any data, on every device.

One device is trained on in the calling process. Several are worker processes (:mod:`.workers.pool`). Under torchrun
each process is a rank already, and the same script runs on several machines unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch

from manyhands.amounts import count_of
from manyhands.backends.torch import devices as backend
from manyhands.backends.torch import virtual
from manyhands.errors import BadBatch, BadSettings, ManyhandsError, WorkerFailed
from manyhands.training import launcher, options
from manyhands.training.checkpoints.run_folder import RunPlan
from manyhands.training.data.roles import ModelInputs, inputs_of
from manyhands.training.evaluation.metrics import MetricCalls, collect_outputs
from manyhands.training.loss import own_step
from manyhands.training.options import Settings
from manyhands.training.result import Result
from manyhands.training.torch import optimizers
from manyhands.training.torch.data.sources import Source, source
from manyhands.training.torch.job import Job, placement_preserved
from manyhands.training.torch.objective import objective_for
from manyhands.training.torch.preflight import checks
from manyhands.training.torch.ranks import world
from manyhands.training.torch.state import job_state, lent_model, module_state, randomness
from manyhands.training.torch.state.module_state import modes_preserved
from manyhands.training.torch.step.logged import attach, may_log
from manyhands.training.trainer import BaseTrainer

if TYPE_CHECKING:
    from manyhands.training.callbacks.events import Dispatcher
    from manyhands.training.learner import Take

_NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "out of memory", "MemoryError")


class Trainer(BaseTrainer):
    __doc__ = BaseTrainer.__doc__

    backend: ClassVar[Any] = backend
    refused: ClassVar[dict[str, str]] = {"wrt": "set it in the model: parameter.requires_grad_(False) freezes a weight"}
    takes_schedulers: ClassVar[bool] = True
    losses_by_name: ClassVar[Mapping[str, Any]] = {
        "cross_entropy": torch.nn.functional.cross_entropy,
        "nll": torch.nn.functional.nll_loss,
        "mse": torch.nn.functional.mse_loss,
        "l1": torch.nn.functional.l1_loss,
        "mae": torch.nn.functional.l1_loss,
        "huber": torch.nn.functional.huber_loss,
        "bce_with_logits": torch.nn.functional.binary_cross_entropy_with_logits,
    }

    def _check_options(self) -> None:
        optimizers.OPTIMIZERS.check(self.options.optimizer, self.options.lr)

    def _as_schedule(self, schedule: Any) -> Any:
        if schedule is None:
            return None
        from manyhands.training.torch import schedulers

        return schedulers.as_schedule(schedule)

    def _virtual_cpus(self, count: int) -> dict[str, Any]:
        """Each is a process of its own."""
        workers = self.options.workers
        if workers.per_device != 1:
            raise BadSettings(
                f"devices={self.options.devices!r} and {options.as_written(workers, 'per_device')} both say how "
                "many processes the CPU gets: give one of them"
            )
        return {"devices": ["cpu"], "workers": dataclasses.replace(workers, per_device=count)}

    def _natives(self) -> list[torch.device]:
        """The device of each rank, as the backend knows it."""
        return [device for device in super()._natives() for _ in range(self.options.workers.per_device)]

    @property
    def device_names(self) -> list[str]:
        """One name per rank. Several ranks on the CPU are printed as virtual devices."""
        ranks = self.options.workers.per_device
        names = [name for name in super().device_names for _ in range(ranks)]
        if ranks == 1:
            return names
        numbers = itertools.count()
        return [f"virtual:{next(numbers)}" if name == "cpu" else name for name in names]

    @functools.cached_property
    def ranks(self) -> list[torch.device]:
        """The device of each rank. On a virtual device a rank uses plain CPU tensors: it is a process of its own."""
        return [
            torch.device("cpu") if virtual.stands_in() or device.type != "cuda" else device
            for device in self._natives()
        ]

    def _source(self, data: Any, *, shuffle: bool) -> Source:
        return source(data, shuffle=shuffle)

    def _may_log(self, model: Any) -> bool:
        return may_log(model)

    @staticmethod
    def _is_array(part: Any) -> bool:
        return isinstance(part, torch.Tensor | np.ndarray)

    def _train(
        self,
        model: torch.nn.Module,
        settings: Settings,
        dispatcher: Dispatcher,
        *,
        run: RunPlan | None,
        resume: Path | None,
    ) -> Result:
        checks.check_trainable(model)
        checks.check_hooks(model)
        before = checks.copy_of(model) if checks.is_lazy(model) else model
        job = self._job(model, settings, run, resume)
        job.callbacks = dispatcher.plan
        with own_step.plots_taken_over(model), attach(model), _explain_errors(dataclasses.replace(job, model=before)):
            with modes_preserved(model):
                checks.materialise(model, self.train_source)
                checks.check_labels(job)
                checks.note_sum(job)
                if (ranks := launcher.size() or len(self.ranks)) > 1 or settings.step.accumulate > 1:
                    from manyhands.training.torch.preflight import loss_trial

                    checks.check_gradient_hooks(model)
                    device = self._launched_device() if launcher.is_launched() else self.ranks[0]
                    loss_trial.check_loss(model, job, ranks, device)
            return self._fit(job, dispatcher)

    def _launched_device(self) -> torch.device:
        """The device of this rank of a launcher: a GPU where every rank of the machine has its own."""
        place = launcher.place()
        on_cpu = self.options.devices is not None and not self.gpus
        gpus = 0 if on_cpu or virtual.stands_in() else torch.cuda.device_count()
        if gpus < (1 if place.sees_own_gpus else place.local_size):
            return torch.device("cpu")
        return torch.device("cuda", 0 if place.sees_own_gpus else place.local_rank)

    def _fit(self, job: Job, dispatcher: Dispatcher) -> Result:
        ranks = [] if launcher.is_launched() else self.ranks
        count = launcher.size() if launcher.is_launched() else len(ranks)
        if job.settings.step.shard and count > 1:
            from manyhands.training.torch.ranks import sharding  # FSDP2, which few jobs need

            sharding.check(job.settings, job.optimizer, ranks)
        job.settings.check_devices(count)
        if launcher.is_launched():
            with self._as_rank(job.settings) as here:
                result = _fit_here(job, here, dispatcher)
                result.devices = launcher.device_names("gpu" if here.device.type == "cuda" else "cpu")
                return result
        if count == 1:
            result = _fit_here(job, world.World(0, 1, ranks[0]), dispatcher)
        else:
            result = self._fit_with_workers(job, dispatcher)
        result.devices = self.device_names
        return result

    def _job(self, model: torch.nn.Module, settings: Settings, run: RunPlan | None, resume: Path | None) -> Job:
        return Job(
            model=model,
            objective=objective_for(model, self.options.loss),
            train=self.train_source,
            test=self.test_source,
            settings=settings,
            optimizer=optimizers.optimizer_for(model, self.options.optimizer, settings.lr),
            schedule=self.options.schedule,
            run=run,
            resume=resume,
            metrics=self._metrics(),
        )

    def _own_meter(self, metric: Any) -> MetricCalls | None:
        from manyhands.training.torch import evaluation

        return evaluation.own_meter(metric)

    @staticmethod
    def _join_arrays(arrays: list[Any]) -> Any:
        from manyhands.training.torch import evaluation

        return evaluation.join_arrays(arrays)

    def _fit_with_workers(self, job: Job, dispatcher: Dispatcher) -> Result:
        from manyhands.training.torch.workers import pool

        def say(event: dict[str, Any]) -> dict[str, Any] | None:
            if event["kind"] == "model":
                return lent_model.receive(event, job.model, dispatcher.event)
            return dispatcher.event(event)

        final_state = pool.pool_for(self.ranks).run(_on_host(job), say)
        _restore_final_state(job, final_state)
        result: Result = final_state["result"]
        if result.signal is not None:
            pool.stop_all()
        return result

    @contextlib.contextmanager
    def _as_rank(self, settings: Settings) -> Iterator[world.World]:
        """The world of a launcher, for as long as a job lasts."""
        place = launcher.place()
        device = self._launched_device()
        gpus = 0 if virtual.stands_in() else torch.cuda.device_count()
        if gpus and device.type == "cpu" and (self.gpus or self.options.devices is None):
            raise BadSettings(
                f"{place.local_size} processes on a machine with {count_of(gpus, 'GPU')}, and each needs one: start "
                f"{gpus} per machine (torchrun --nproc-per-node={gpus}), or give devices=['cpu']"
            )
        name = "nccl" if device.type == "cuda" else "gloo"
        seconds = world.PATIENCE_UNDER_LAUNCHER * settings.workers.hang_seconds
        here = world.join(place.rank, place.size, device, name, address=None, seconds=seconds)
        try:
            yield here
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise WorkerFailed(
                f"rank {place.rank} waited {count_of(seconds, 'second')} for another rank, which hangs or died "
                f"({world.PATIENCE_UNDER_LAUNCHER} times Workers(hang_seconds={settings.workers.hang_seconds:g}))"
            ) from error
        finally:
            world.leave(here)

    # The search for the largest batch

    searches_batch_size: ClassVar[bool] = True

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        """Afterwards random numbers and memory are as before."""
        with randomness.preserve(self.ranks[0]):
            try:
                yield
            finally:
                gc.collect()
                torch.cuda.empty_cache()

    def _copies_of(self, model: torch.nn.Module, optimizer: Any) -> tuple[Any, Any]:
        return copy.deepcopy((model, optimizer), checks.lazy_buffers(model))

    def _is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)

    # Evaluation and prediction

    def _evaluate(self, model: torch.nn.Module, source: Source, settings: Settings) -> dict[str, Any]:
        job = self._other_job(model, source, settings, "evaluate")
        job.metrics = self._metrics()
        with own_step.plots_taken_over(model), attach(model), _explain_errors(job):
            with modes_preserved(model):
                checks.check_labels(job)
            metrics = self._compute(job, None)
        assert metrics is not None
        return metrics

    def _inputs_of(self, model: Any, targets: bool | None) -> ModelInputs:
        checks.check_is_module(model)
        return inputs_of(model.forward, type(model).__name__, targets)

    def _predict(self, model: torch.nn.Module, source: Source, settings: Settings, inputs: ModelInputs) -> Any:
        job = self._other_job(model, source, settings, "predict")
        job.inputs = inputs
        with _explain_errors(job):
            return collect_outputs(lambda _, take: self._compute(job, take), self._join_arrays)

    def _other_job(
        self, model: torch.nn.Module, source: Source, settings: Settings, purpose: Literal["evaluate", "predict"]
    ) -> Job:
        checks.check_is_module(model)
        if checks.is_lazy(model):
            raise BadSettings("the model has layers without weights yet (lazy ones): call it on a few samples first")
        objective = objective_for(model, self.options.loss)
        return Job(model, objective, source, None, settings, _no_optimizer, purpose=purpose)

    def _compute(self, job: Job, take: Take | None) -> dict[str, Any] | None:
        from manyhands.training.torch import evaluation

        if launcher.is_launched():
            with self._as_rank(job.settings) as here:
                return evaluation.in_process(job, here, take)
        if len(self.ranks) == 1:
            return evaluation.in_process(job, world.World(0, 1, self.ranks[0]), take)
        return evaluation.with_workers(_on_host(job), self.ranks, take)


def _no_optimizer(model: Any) -> Any:
    raise BadSettings("a job that trains nothing has no optimizer")


def _fit_here(job: Job, here: world.World, dispatcher: Dispatcher) -> Result:
    """Train in this process; leave the model, and the caller's random numbers, where they were."""
    from manyhands.training.torch.learner import loop_of  # what a job in worker processes does not need here

    try:
        with randomness.preserve(here.device), placement_preserved(job.model), modes_preserved(job.model):
            loop, rank = loop_of(job, here, dispatcher.event)
            result = loop.fit()
            rank.update_caller_model()
            return result
    finally:
        if isinstance(job.optimizer, torch.optim.Optimizer):
            job_state.settle(job.optimizer)


def _restore_final_state(job: Job, final_state: dict[str, Any]) -> None:
    """Put what a worker sent into the caller's model and optimizer."""
    job_state.restore_model(job.model, final_state["weights"])
    module_state.restore(job.model, *final_state["module_state"])
    if isinstance(job.optimizer, torch.optim.Optimizer):
        job_state.restore_optimizer(
            job.optimizer, final_state["optimizer"], final_state["optimizer_numbers"], final_state["optimizer_groups"]
        )
        from manyhands.training.torch import schedulers

        schedulers.restore_final_state(job.schedule, job.optimizer, final_state["scheduler"])


def _on_host(job: Job) -> Job:
    """The job with its model and optimizer in the host's memory, to be sent."""
    if all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in job.model.parameters()):
        return job
    from manyhands.training.torch.workers import job_bytes

    sent = copy.copy(job)
    try:  # as for a worker: hooks come along, and hold the copies
        sent.model, sent.optimizer = job_bytes.loads(job_bytes.dumps((job.model, job.optimizer)))
    except Exception:
        return job  # the pool says what of it cannot be sent
    sent.model.to("cpu")
    return sent


@contextlib.contextmanager
def _explain_errors(job: Job) -> Iterator[None]:
    """Raises a BadBatch that says what to change, where PyTorch may have refused the samples, here or in a worker."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ManyhandsError, OSError)) and not isinstance(error, WorkerFailed):
            raise
        from manyhands.training.torch.preflight import lessons

        lesson = None
        with contextlib.suppress(Exception):  # nothing is to be learnt from that: the first error counts
            lesson = lessons.of_prediction(job) if job.purpose == "predict" else lessons.of(job, error)
        if lesson is None:
            raise
        raise BadBatch(lesson) from error
