"""``trainer.find_batch_size``: real steps on a copy of the model, with larger and larger batches.

Each device makes the steps of its shard alone, so that a device without memory left keeps no other one waiting; the
ranks of a launcher exchange the outcome. A GPU raises an error when its memory is full. A host does not: it swaps, or
kills the process. So on a CPU the memory of steps is measured, and a batch is only tried where the one before suggests
that it stays within the bound.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from manyhands.errors import LossIsNotANumber
from manyhands.training import launcher
from manyhands.training.book import plots
from manyhands.training.callbacks.plan import NO_CALLBACKS
from manyhands.training.limits import batch_size_bisection, host_memory
from manyhands.training.options import Checkpoints, Limits
from manyhands.training.torch import optimizers
from manyhands.training.torch.data.sources import Arrays, Samples
from manyhands.training.torch.job import Job
from manyhands.training.torch.learner import loop_of
from manyhands.training.torch.objective import objective_for
from manyhands.training.torch.preflight import checks
from manyhands.training.torch.ranks import world
from manyhands.training.torch.state import randomness

if TYPE_CHECKING:
    from manyhands.training.torch.trainer import Trainer

_STEPS = 3  # the first ones make the optimizer's state
_FOR_OTHERS = 512 * 2**20  # bytes of a GPU that NCCL takes where there are several
_NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "out of memory")


@dataclass
class Search:
    """One search: its trainer, model and data, and what was measured so far."""

    trainer: Trainer
    model: torch.nn.Module
    data: Arrays | Samples
    memory: int | None  # the bound of one device, in bytes
    micro: bool  # whether micro-batches are tried, of the trainer's batch
    trials: dict[str, host_memory.Trials] = field(default_factory=dict)  # of each device without memory of its own

    def largest(self, maximum: int | None) -> int:
        if not launcher.is_launched():
            ranks = self.trainer.ranks
            return self._search(ranks, maximum, lambda fits: fits)
        with self.trainer._as_rank(self.trainer._settings_with(None), lambda event: None) as here:
            devices = [here.device] * here.size

            def on_all(fits: bool) -> bool:
                return all(bool(each) for each in here.gather(torch.tensor([fits])))

            return self._search(devices, maximum, on_all)

    def _search(self, devices: list[torch.device], maximum: int | None, on_all: Callable[[bool], bool]) -> int:
        def fits(batch: int, micro: int | None) -> bool:
            sizes = batch_size_bisection.shards(self.trainer, batch, len(devices))
            shards = dict.fromkeys(devices, max(sizes) if micro is not None else 0)
            for device, size in zip(devices, sizes, strict=True):
                shards[device] = max(shards[device], size)
            return on_all(all(self._fits(device, shard, micro) for device, shard in shards.items()))

        return batch_size_bisection.find(self.trainer, self.data, len(devices), maximum, fits, micro=self.micro)

    def _fits(self, device: torch.device, shard: int, micro: int | None) -> bool:
        if device.type == "cuda":
            with self._bounded(device):
                return self._tried(device, shard, micro)
        trials = self.trials.setdefault(str(device), host_memory.Trials())
        return trials.fit(micro or shard, self._bound_of_host(), lambda: self._tried(device, shard, micro))

    def _bound_of_host(self) -> int:
        if self.memory is not None:
            return self.memory
        ranks = launcher.place().local_size if launcher.is_launched() else len(self.trainer.ranks)
        return host_memory.bound(ranks)

    @contextlib.contextmanager
    def _bounded(self, device: torch.device) -> Iterator[None]:
        """A GPU's memory up to the bound, without what several of them need to sum gradients."""
        several = launcher.size() > 1 or len(self.trainer.ranks) > 1
        total = torch.cuda.get_device_properties(device).total_memory
        if self.memory is not None:
            torch.cuda.empty_cache()
            bound = self.memory + torch.cuda.memory_reserved(device)  # what the caller has there is not the job's
            torch.cuda.set_per_process_memory_fraction(min(1.0, bound / total), device)
        reserve = torch.empty(_FOR_OTHERS if several else 0, dtype=torch.uint8, device=device)
        try:
            yield
        finally:
            del reserve
            torch.cuda.empty_cache()
            if self.memory is not None:
                torch.cuda.set_per_process_memory_fraction(1.0, device)

    def _tried(self, device: torch.device, shard: int, micro: int | None) -> bool:
        """Whether a few steps of a shard could be made."""
        try:
            with randomness.preserved(device):
                loop_of(self._job(shard, micro), world.World(0, 1, device), lambda event: None)[0].fit()
            return True
        except LossIsNotANumber:  # after its step
            return True
        except (torch.OutOfMemoryError, MemoryError):
            return False
        except RuntimeError as error:
            if not any(words in str(error) for words in _NO_MEMORY):
                raise
            return False
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def _job(self, shard: int, micro: int | None) -> Job:
        """A few steps on a copy, without files and callbacks; an average of the weights takes memory, so it stays."""
        trainer = self.trainer
        both = (self.model, trainer._option("optimizer"))
        model, optimizer = copy.deepcopy(both, checks.lazy_buffers(self.model))
        plots.take_over(model)
        checks.materialise(model, self.data)
        settings = trainer._settings_with(shard)
        parts = settings.step.accumulate if micro is None else -(-shard // micro)
        step = dataclasses.replace(settings.step, shares=None, accumulate=parts, micro_batch_size=None)
        limits = Limits(max_steps=_STEPS)
        settings = dataclasses.replace(settings, step=step, limits=limits, checkpoints=Checkpoints(), max_epochs=_STEPS)
        averages = [callback.averaging for callback in trainer._callbacks() if callback.averaging is not None]
        return Job(
            model=model,
            objective=objective_for(model, trainer._option("loss")),
            train=dataclasses.replace(self.data, batch_size=None),
            test=None,
            settings=settings,
            optimizer=optimizers.optimizer_for(model, optimizer, settings.lr),
            callbacks=dataclasses.replace(NO_CALLBACKS, average=averages[0] if averages else None),
        )
