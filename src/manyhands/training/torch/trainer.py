"""``Trainer``: any module, any loss, any optimizer, any data, on every device; and the book's ``train``.

One device is trained on in the calling process. Several are worker processes (:mod:`.pool`). Under torchrun each
process is a rank already, and the same script runs on several machines unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from manyhands.backends import torch as backend
from manyhands.device import Device
from manyhands.errors import BadRunFolder, BadSettings, NoCheckpoint, WorkerFailed
from manyhands.placement import Placement
from manyhands.training import checkpoint
from manyhands.training.display import Display
from manyhands.training.run_folder import RunFolder
from manyhands.training.settings import BatchStats, Precision, Settings
from manyhands.training.torch import checks, pool, randomness, state, world
from manyhands.training.torch.figures import modes_kept
from manyhands.training.torch.job import Job, Result, Schedule
from manyhands.training.torch.objective import objective_for
from manyhands.training.torch.rank import Rank
from manyhands.training.torch.sources import Source, source
from manyhands.training.vocabulary import HyperParameters

_DEFAULT_BATCH = 256
_DEFAULT_RATE = 0.1


class Trainer(HyperParameters):
    """Trains a model on every device it is given, with the update that one device would make.

    The book's arguments come first: ``max_epochs``, ``num_gpus`` (as many as there are of them; 0 is the CPU) and
    ``gradient_clip_val`` (the global norm of the gradients; 0 does not clip). All others are by name.
    """

    def __init__(
        self,
        max_epochs: int = 10,
        num_gpus: int = 0,
        gradient_clip_val: float = 0,
        *,
        devices: Sequence[torch.device | Device | str] | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
        schedule: Schedule | None = None,
        shares: Sequence[float] | Literal["measured"] | None = None,
        accumulate: int = 1,
        batch_stats: BatchStats = "per_device",
        precision: Precision = "auto",
        seed: int = 0,
        fast: bool = True,
        compile: bool | None = None,
        on_nan: Literal["stop", "continue"] = "stop",
        run: str | Path | None = None,
        resume: str | Path | Literal["auto"] | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int = 3,
        ranks_per_device: int = 1,
        hang_seconds: float = 60.0,
        quiet: bool = False,
    ) -> None:
        self.save_hyperparameters()
        if isinstance(ranks_per_device, bool) or not isinstance(ranks_per_device, Integral) or ranks_per_device < 1:
            raise BadSettings(f"ranks_per_device={ranks_per_device!r}: give a whole number of at least 1")
        for name, given in (("loss", loss), ("schedule", schedule), ("optimizer", optimizer)):
            if given is not None and not callable(given) and not isinstance(given, torch.optim.Optimizer):
                raise BadSettings(f"{name}={given!r} is a {type(given).__name__}: give a function")
        if devices is None:
            self.gpus = [backend.gpu(i) for i in range(min(num_gpus, backend.num_gpus()))]
        else:
            self.gpus = [one for one in self._natives() if backend.neutral(one).kind != "cpu"]

    # The book lets readers write __init__ themselves, with its three arguments and self.gpus: nothing below relies on
    # more than that.

    gpus: list[torch.device]
    result: Result | None = None

    def _option(self, name: str) -> Any:
        return vars(self).get(name, _DEFAULTS[name])

    def _natives(self) -> list[torch.device]:
        """The device of each rank, as the backend knows it."""
        devices = self._option("devices")
        once = Placement(backend).distinct(devices) if devices is not None else list(self.gpus) or [backend.cpu()]
        return [device for device in once for _ in range(self._option("ranks_per_device"))]

    @property
    def device_names(self) -> list[str]:
        return [str(backend.neutral(device)) for device in self._natives()]

    @functools.cached_property
    def ranks(self) -> list[torch.device]:
        """The device of each rank. Virtual ones are made of the CPU; a rank is a process, so plain CPU tensors do."""
        return [device if device.type == "cuda" else torch.device("cpu") for device in self._natives()]

    # The book's hooks, for loops written by hand

    def prepare_batch(self, batch: Any) -> Any:
        """The batch on the first of the trainer's devices."""
        place = Placement(backend)
        return [place.to_leaf(part, self.gpus[0]) for part in batch] if self.gpus else batch

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model on the first of the trainer's devices, knowing its trainer."""
        model.trainer = self  # type: ignore[assignment]
        return model.to(self.gpus[0]) if self.gpus else model

    def prepare_data(self, data: Any) -> None:
        """Find the training and the test part of what the user has."""
        self.train_source, self.test_source = _two_sources(data)

    # Training

    def fit(self, model: torch.nn.Module, data: Any) -> Result:
        """Train the model, in place; gives what came of it (also as ``trainer.result``).

        ``data``: (X, y) tensors or arrays, a Dataset, a DataLoader, an object with ``train_dataloader`` and
        ``val_dataloader``; or a pair of two such, for training and testing.
        """
        self.train_source, self.test_source = _two_sources(data)
        settings = self._settings(model)
        _check_model(model)
        with modes_kept(model):
            checks.materialise(model, self.train_source)
            job = self._job(model, settings)
            checks.check_labels(model, job)
            if not _mixes_samples(model):
                checks.check_loss(model, job, world.launched_size() or len(self.ranks))
        with Display(settings.max_epochs, quiet=self._option("quiet") or not world.is_first()) as display:
            if world.under_torchrun():
                result = self._fit_as_rank(job, display)
            else:
                ranks = self.ranks
                settings.check_devices(len(ranks))
                if len(ranks) == 1:
                    result = _fit_here(job, world.World(0, 1, ranks[0]), display)
                else:
                    result = self._fit_with_workers(job, display)
                result.devices = self.device_names
        result.run = str(job.run) if job.run else None
        self.result = result
        return result

    def _settings(self, model: Any) -> Settings:
        names = {field.name for field in dataclasses.fields(Settings)} - {"batch_size", "lr"}
        rate, size = self._option("lr"), self._option("batch_size")
        if rate is None:
            rate = getattr(model, "lr", _DEFAULT_RATE)
        if size is None:
            size = self.train_source.batch_size or _DEFAULT_BATCH
        return Settings(batch_size=size, lr=rate, **{name: self._option(name) for name in names})

    def _job(self, model: torch.nn.Module, settings: Settings) -> Job:
        run = Path(self._option("run")).absolute() if self._option("run") is not None else None
        resume = self._option("resume")
        if run is not None and world.is_first():
            _open_run(run, settings, resumes=resume is not None)
        return Job(
            model=model,
            objective=objective_for(model, self._option("loss")),
            train=self.train_source,
            test=self.test_source,
            settings=settings,
            optimizer=_optimizer(model, self._option("optimizer"), settings.lr),
            schedule=self._option("schedule"),
            run=run,
            resume=_resume(resume, run) if world.is_first() else None,  # it is sent to the other ranks
        )

    def _fit_with_workers(self, job: Job, display: Display) -> Result:
        sent = _on_host(job)
        home = pool.pool_for(self.ranks).run(sent, display.event)
        state.restore_model(job.model, home["weights"])
        if isinstance(job.optimizer, torch.optim.Optimizer):
            state.restore_optimizer(
                job.optimizer, home["optimizer"], home["optimizer_numbers"], home["optimizer_groups"]
            )
        result: Result = home["result"]
        return result

    def _fit_as_rank(self, job: Job, display: Display) -> Result:
        """This process is one rank of several, as torchrun's environment says."""
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local, on_node = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
        on_cpu = self._option("devices") is not None and not self.gpus
        own_gpu = not on_cpu and torch.cuda.device_count() >= on_node
        device = torch.device("cuda", local) if own_gpu else torch.device("cpu")
        job.settings.check_devices(size)
        name = "nccl" if own_gpu else "gloo"
        seconds = world.PATIENCE_UNDER_LAUNCHER * job.settings.hang_seconds
        here = world.join(rank, size, device, name, address=None, seconds=seconds)
        try:
            result = _fit_here(job, here, display)
            result.devices = [f"{'gpu' if own_gpu else 'cpu'} of rank {one}" for one in range(size)]
            return result
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise WorkerFailed(
                f"rank {rank} waited {seconds:g} seconds for another one, which hangs or is gone "
                f"({world.PATIENCE_UNDER_LAUNCHER} times hang_seconds)"
            ) from error
        finally:
            world.leave(here)


# As written here: a reader of the book may put in another __init__.
_DEFAULTS = {name: one.default for name, one in inspect.signature(Trainer.__init__).parameters.items()}


def train(net: torch.nn.Module, num_gpus: int, batch_size: int, lr: float, num_epochs: int = 10) -> Result:
    """The book's ``train``: Fashion-MNIST, plain SGD; prints the book's last line."""
    from manyhands.training.torch.datasets import load_data_fashion_mnist

    data = load_data_fashion_mnist(batch_size)
    result = Trainer(num_epochs, num_gpus, batch_size=batch_size, lr=lr).fit(net, data)
    print(result)
    return result


def _fit_here(job: Job, here: world.World, display: Display) -> Result:
    """Train in this process; leave the model, and the caller's random numbers, where they were."""
    device = next(job.model.parameters()).device
    dtypes = {name: tensor.dtype for name, tensor in _own_tensors(job.model)}
    try:
        with randomness.kept(here.device), modes_kept(job.model):
            return Rank(job, here, display.event).fit()
    finally:
        job.model.to(device)
        job.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        for name, tensor in _own_tensors(job.model):
            tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))
            if tensor.grad is not None and tensor.grad.dtype != tensor.dtype:
                tensor.grad = tensor.grad.to(tensor.dtype)
        if isinstance(job.optimizer, torch.optim.Optimizer):
            state.settle(job.optimizer)


def _own_tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a model, those that it does not save too."""
    return [*model.named_parameters(), *model.named_buffers()]


def _two_sources(data: Any) -> tuple[Source, Source | None]:
    if hasattr(data, "train_dataloader"):
        test = data.val_dataloader() if hasattr(data, "val_dataloader") else None
        return source(data.train_dataloader()), None if test is None else source(test, shuffle=False)
    if isinstance(data, (tuple, list)) and len(data) == 2 and not isinstance(data[0], torch.Tensor):
        import numpy as np

        if not isinstance(data[0], np.ndarray):
            return source(data[0]), source(data[1], shuffle=False)
    return source(data), None


def _optimizer(model: Any, given: Any, rate: float) -> Any:
    if isinstance(given, torch.optim.Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(parameter) not in own for group in given.param_groups for parameter in group["params"]):
            raise BadSettings("the optimizer has parameters that are not of this model: make it of model.parameters()")
        return given
    if given is not None:
        return _FromParameters(given)
    if hasattr(model, "configure_optimizers"):
        return _Configured()
    return _Sgd(rate)


class _FromParameters:
    """A function of the parameters, as ``lambda p: torch.optim.AdamW(p, lr=1e-3)``."""

    def __init__(self, function: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.function = function

    def __call__(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return self.function(model.parameters())


class _Configured:
    def __call__(self, model: Any) -> torch.optim.Optimizer:
        return model.configure_optimizers()  # type: ignore[no-any-return]


class _Sgd:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.rate)


def _on_host(job: Job) -> Job:
    """The job with its model and optimizer in the host's memory, to be sent."""
    if all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in job.model.parameters()):
        return job
    sent = copy.copy(job)
    sent.model, sent.optimizer = copy.deepcopy((job.model, job.optimizer))
    sent.model.to("cpu")
    return sent


def _open_run(path: Path, settings: Settings, *, resumes: bool) -> None:
    run = RunFolder.at(path)
    if not resumes and checkpoint.latest(run.checkpoints) is not None:
        raise BadRunFolder(
            f"{path} holds checkpoints of a run: give resume='auto' to go on with it, or another folder to begin anew"
        )
    run.config = {**(run.config if run.config_path.exists() else {}), "settings": settings.as_dict()}


def _resume(resume: str | Path | None, run: Path | None) -> Path | None:
    if resume is None:
        return None
    if resume == "auto":
        folder = None if run is None else run / "checkpoints"
        return folder if folder is not None and checkpoint.latest(folder) is not None else None
    path = Path(resume)
    found = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not found.exists():
        raise NoCheckpoint(f"there is no run or checkpoint at {path}")
    return found


def _mixes_samples(model: torch.nn.Module) -> bool:
    """Whether a layer takes statistics of the batch in evaluation too: a loss is then no mean over samples."""
    return any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in model.modules())


def _check_model(model: torch.nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadSettings(f"a {type(model).__name__} has no parameters that could be trained")
