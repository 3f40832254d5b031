"""``trainer.find_batch_size`` where one process drives all devices, as in JAX, TensorFlow and MXNet.

Each size is tried with a few real steps on copies, over all devices at once. A GPU says itself when its memory is full.
On a CPU the memory that steps take is measured, and a batch is only tried where the one before lets us expect that it
stays within the bound. PyTorch has a search of its own: its devices are processes, and tried one by one.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from typing import TYPE_CHECKING, Any

from manyhands.errors import BadSettings, LossIsNotANumber
from manyhands.training import launcher
from manyhands.training.data.sources import Arrays
from manyhands.training.limits import batch_size_bisection, host_memory
from manyhands.training.options import Checkpoints, Limits

if TYPE_CHECKING:
    from manyhands.training.trainer import BaseTrainer

_STEPS = 3  # the first ones make the optimizer's state


class Search:
    """One search: its trainer, model and data, and what was measured so far."""

    def __init__(self, trainer: BaseTrainer, model: Any, memory: int | None, *, micro: bool) -> None:
        """``memory``: the bound of one device, in bytes; ``micro``: micro-batches are tried, of the trainer's batch."""
        if launcher.size() > 1:
            raise BadSettings("find_batch_size in a job of several processes is there in PyTorch only: call it in one")
        if not isinstance(trainer.train_source, Arrays):
            raise BadSettings("find_batch_size: a loader has its own batches: give (X, y) instead")
        self.trainer, self.model, self.memory, self.micro = trainer, model, memory, micro
        self.data: Arrays = trainer.train_source
        self.devices = trainer._natives()
        self.on_host = all(trainer.backend.neutral(device).kind != "gpu" for device in self.devices)
        if memory is not None and not self.on_host:
            raise BadSettings(
                f"find_batch_size(memory=...): {trainer.backend.name} cannot be kept below a bound on a GPU; leave it "
                "out, for all of the GPU's memory"
            )
        self._trials = host_memory.Trials()

    def largest(self, maximum: int | None) -> int:
        count = len(self.devices)
        return batch_size_bisection.find(self.trainer, self.data, count, maximum, self._fits, micro=self.micro)

    def _fits(self, batch: int, micro: int | None) -> bool:
        if not self.on_host:
            return self._tried(batch, micro)
        bound = host_memory.bound(1) if self.memory is None else self.memory * len(self.devices)
        return self._trials.fit(micro or batch, bound, lambda: self._tried(batch, micro))

    def _tried(self, batch: int, micro: int | None) -> bool:
        """Whether a few steps could be made."""
        try:
            with self.trainer._trial(self.model, self.trainer._option("optimizer")) as (model, optimizer):
                self._trainer_of(batch, micro, optimizer).fit(model, dataclasses.replace(self.data, batch_size=None))
        except LossIsNotANumber:  # after its step
            return True
        except MemoryError:
            return False
        except Exception as error:
            if not self.trainer._is_out_of_memory(error):
                raise
            return False
        finally:
            model = optimizer = None
            gc.collect()
        return True

    def _trainer_of(self, batch: int, micro: int | None, optimizer: Any) -> BaseTrainer:
        """The same trainer for a few steps, without files and callbacks; an average of the weights takes memory."""
        trainer, step = copy.copy(self.trainer), self.trainer._option("step")
        if micro is not None:
            step = dataclasses.replace(step, micro_batch_size=micro, accumulate=1)
        vars(trainer).update(
            batch_size=batch,
            max_epochs=_STEPS,
            limits=Limits(max_steps=_STEPS),
            step=step,
            optimizer=optimizer,
            callbacks=[callback for callback in self.trainer._callbacks() if callback.averaging is not None],
            loggers=(),
            metrics=None,
            checkpoints=Checkpoints(),
            run=None,
            resume=None,
            quiet=True,
        )
        return trainer
