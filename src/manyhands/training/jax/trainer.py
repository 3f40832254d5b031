"""``Trainer``: any NNX module, any loss, any Optax optimizer, on every device; and the book's ``train``.

All devices of a process are driven by it, in one compiled program. With a launcher's environment each process drives
its own, and the same script runs on several machines unchanged (:mod:`.world`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from manyhands.backends.jax import devices as backend
from manyhands.training import launcher, refusals
from manyhands.training.callbacks.events import Dispatcher
from manyhands.training.checkpoints.run_folder import RunPlan
from manyhands.training.data.loader_batches import Samples, is_random_access
from manyhands.training.data.roles import ModelInputs, inputs_of
from manyhands.training.data.sources import Source, Stream, Structure, is_dataset, source
from manyhands.training.jax import checks, linen, optimizers, world
from manyhands.training.jax.evaluation import Evaluation, apart
from manyhands.training.jax.learner import JaxLearner, Job
from manyhands.training.jax.objective import call_of, cross_entropy, explain_errors, objective_for
from manyhands.training.jax.skeleton import Skeleton
from manyhands.training.options import BatchStats, Settings
from manyhands.training.result import Result
from manyhands.training.trainer import DEFAULT_BATCH, BaseTrainer

_WITH_BF16 = 8.0  # a GPU's compute capability
_DTYPES = {"bf16": jnp.bfloat16, "fp64": jnp.float64}  # that layers compute in, by precision


def _per_sample(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A loss of Optax's that compares numbers one by one, as the mean over each sample's numbers."""

    def loss(output: Any, target: Any) -> Any:
        if output.shape != target.shape:
            raise refusals.unlike_target(output.shape, target.shape)
        return function(output, target).reshape(len(output), -1).mean(1)

    return loss


def _absolute_error(output: Any, target: Any) -> Any:
    return jnp.abs(output - target)


class Trainer(BaseTrainer):
    __doc__ = BaseTrainer.__doc__

    backend: ClassVar[Any] = backend
    losses_by_name: ClassVar[Mapping[str, Any]] = {
        "cross_entropy": cross_entropy,
        "mse": _per_sample(optax.squared_error),
        "l1": _per_sample(_absolute_error),
        "mae": _per_sample(_absolute_error),
        "huber": _per_sample(optax.huber_loss),
        "bce_with_logits": _per_sample(optax.sigmoid_binary_cross_entropy),
    }
    refused: ClassVar[dict[str, str]] = {
        "precision='fp16'": "its gradients underflow without loss scaling, which is PyTorch's alone here; give 'bf16'",
        "shard": "FSDP2 is PyTorch's; in JAX the shardings of a model divide it",
        "activation_checkpointing": "set it in the model: wrap its blocks in jax.checkpoint (nnx.remat)",
        "per_device": "in JAX one process drives all devices; mh.virtual_devices(n) makes virtual CPU devices",
        "hang_seconds": "in JAX one process drives all devices, there are no workers to watch",
        "shares": "a step in JAX is one program over all devices, with as many rows on each; leave it out",
        "optimize='max'": "a step in JAX is always compiled, by XLA; leave it out",
        "batch_stats='per_device'": "a step in JAX is one program over the whole batch, and so are BatchNorm's "
        "statistics; leave it out, or give 'global'",
    }
    default_batch_stats: ClassVar[BatchStats] = "global"
    searches_batch_size: ClassVar[bool] = True
    # Of a Linen module, which holds no weights: the module after training, bound to its variables.
    model: Any = None

    def _check_options(self) -> None:
        lr = self.options.lr
        optimizers.check(self.options.optimizer, lr)
        if callable(lr):  # a schedule of Optax: the optimizer is made with it
            self.optimizer, self.lr = optimizers.OPTIMIZERS.create(None, self.options.optimizer, lr), None

    def _source(self, data: Any, *, shuffle: bool) -> Source:
        structure = Structure(dicts=True)
        if is_random_access(data):
            size = self.options.batch_size or DEFAULT_BATCH
            return Stream(Samples(data, size), size, shuffle, structure=structure)
        return source(data, shuffle=shuffle, structure=structure)

    def _is_one_data_set(self, data: Any) -> bool:
        """Two dicts of the same names are data to train on and data to validate with."""
        if not is_dataset(data):
            return False
        first, second = data[:2]
        return not (isinstance(first, Mapping) and isinstance(second, Mapping) and first.keys() == second.keys())

    def _copies_of(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Optax's optimizers, and Linen's modules, hold nothing that a step changes."""
        return model if linen.is_linen(model) else nnx.clone(model), optimizer

    def _is_out_of_memory(self, error: Exception) -> bool:
        words = ("RESOURCE_EXHAUSTED", "Out of memory")  # the latter where it is found when a program is running
        return isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in words)

    def _train(
        self, model: nnx.Module, settings: Settings, dispatcher: Dispatcher, *, run: RunPlan | None, resume: Path | None
    ) -> Result:
        if linen.is_linen(model):
            world.check()
            inputs = checks.first_inputs(model, self.train_source)
            with explain_errors(model, *inputs):
                variables = linen.variables_of(model, *inputs, settings.seed)
            wrapped = linen.as_nnx(model, variables, settings.seed)
            result = self._train(wrapped, settings, dispatcher, run=run, resume=resume)
            self.model = linen.as_linen(wrapped, variables)
            return result
        with self._world(settings) as here:
            settings.check_devices(len(here.devices))
            job = self._job(model, settings, here)
            learner = JaxLearner(job, here)
            if settings.step.accumulate > 1:
                learner.notes += checks.check_loss(model, job.skeleton, job.objective, job.train)
            loop = self._loop(learner, model, settings, dispatcher, run=run, resume=resume)
            if settings.precision == "auto":
                own = "the model's own", "no GPU with bfloat16, or optimize='off'"
                learner.chosen_precision = own if job.dtype is None else ("bf16", "the GPU has bfloat16")
            result = loop.fit()
        kind, per_rank = backend.neutral(self._natives()[0]).kind, len(here.devices) // here.size
        result.devices = self.device_names if here.size == 1 else launcher.device_names(kind, per_rank)
        return result

    @contextlib.contextmanager
    def _world(self, settings: Settings) -> Iterator[world.World]:
        """The devices; within it JAX computes in 64 bits, if asked."""
        world.check()
        with jax.enable_x64(True) if settings.precision == "fp64" else contextlib.nullcontext(), world.without_mesh():
            yield world.World(self._natives())

    def _inputs_of(self, model: Any, targets: bool | None) -> ModelInputs:
        call: Any = call_of(model) if callable(model) else None
        return inputs_of(call, type(model).__name__, targets)

    @contextlib.contextmanager
    def _evaluation_of(
        self, model: nnx.Module, source: Source, settings: Settings, *, tests: bool
    ) -> Iterator[Evaluation]:
        model = linen.with_weights(model)
        objective = objective_for(model, self.options.loss)
        if tests:
            checks.check_labels(model, objective, source)
        with self._world(settings) as here:
            yield apart(model, objective, source, here, settings, _DTYPES.get(settings.precision))

    def _job(self, model: nnx.Module, settings: Settings, here: world.World) -> Job:
        skeleton = Skeleton(model, settings.step.wrt)
        objective = objective_for(model, self.options.loss)
        labels = checks.check_labels(model, objective, self.train_source, self.test_source)
        parameters, chosen = skeleton.numbers(model)["parameters"], self.options.optimizer
        optimizer, name = optimizers.optimizer_for(
            model, chosen, settings.lr, parameters, scheduled=self.options.schedule is not None
        )
        return Job(
            model=model,
            skeleton=skeleton,
            objective=objective,
            optimizer=optimizer,
            optimizer_name=name,
            train=self.train_source,
            test=self.test_source,
            settings=settings,
            dtype=_dtype(settings, here.devices[0]),
            labels=labels,
            rate=optimizers.rate_of(model, chosen, settings.lr, optimizer, parameters),
        )


def _dtype(settings: Settings, device: jax.Device) -> Any:
    """The dtype that layers compute in; None: that of their parameters."""
    if settings.precision in _DTYPES:
        return _DTYPES[settings.precision]
    if settings.precision != "auto" or settings.step.optimize == "off" or device.platform == "cpu":
        return None
    return jnp.bfloat16 if float(getattr(device, "compute_capability", 0) or 0) >= _WITH_BF16 else None
