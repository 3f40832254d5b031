"""``Trainer.find_batch_size``: real steps on copies of the model, with larger and larger batches.

The size is doubled until a batch does not fit, then bisected::

    tried     8   16   32   64   128   96   112   104      8 to 64 fit, 128 does not
    fits      *    *    *    *     -    *     -     *      104 is the answer: within an eighth of the largest

A host raises no error when its memory is full: it swaps, or kills the process. So on a CPU the search needs a maximum.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from manyhands import shares as _shares
from manyhands.errors import BadSettings, LossIsNotANumber
from manyhands.training import launcher
from manyhands.training.options import Checkpoints, Limits

if TYPE_CHECKING:
    from manyhands.training.trainer import BaseTrainer

_FIRST = 8  # samples per device
_NEAR = 8  # the answer is within this part of the largest that fits
_STEPS = 3  # the first ones make the optimizer's state


def find(trainer: BaseTrainer, model: Any, maximum: int | None, of: Literal["batch", "micro_batch"]) -> int:
    """The largest batch of a trainer, or the largest micro-batch of its batch."""
    data, devices = trainer.train_source, trainer._natives()
    if not trainer.searches_batch_size:
        raise BadSettings("find_batch_size is there in PyTorch and in JAX: here try some sizes, as batch_size=64")
    if of not in ("batch", "micro_batch"):
        raise BadSettings(f"find_batch_size(of={of!r}): choose one of batch, micro_batch")
    if launcher.size() > 1:
        raise BadSettings("find_batch_size: call it in one process, not under a launcher, and give batch_size= there")
    if data.count is None:
        raise BadSettings("find_batch_size: a loader has its own batches: give (X, y) instead, or in PyTorch a Dataset")
    if maximum is None and any(trainer.backend.neutral(device).kind == "cpu" for device in devices):
        raise BadSettings("find_batch_size on a CPU, where no error says that memory is full: give maximum=")
    if of == "batch":
        most = min(int(maximum or data.count), data.count)
        return largest(lambda size: _fits(trainer, model, size, None), most, len(devices))
    settings = trainer._settings_with(trainer.options.batch_size or data.batch_size)
    shard = max(_shares.sizes(settings.batch_size, len(devices), settings.fixed_shares))
    return largest(lambda size: _fits(trainer, model, settings.batch_size, size), min(int(maximum or shard), shard), 1)


def largest(fits: Callable[[int], bool], maximum: int, devices: int) -> int:
    """The largest size up to ``maximum`` that fits, or one near it; a multiple of ``devices``, or ``maximum``."""
    good, size = 0, min(_FIRST * devices, maximum)
    while fits(size):
        good = size
        if good == maximum:
            return good
        size = min(2 * size, maximum)
    bad = size
    while bad - good > max(devices, good // _NEAR):
        middle = (good + bad) // 2 // devices * devices
        if middle in (good, bad):
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    if not good:
        raise BadSettings(f"not even a batch of {bad} fits: give more memory, or a smaller model")
    return good


def _fits(trainer: BaseTrainer, model: Any, batch: int, micro: int | None) -> bool:
    """Whether a few steps succeed on all devices, on a copy of the model."""
    data = dataclasses.replace(trainer.train_source, batch_size=None)
    with trainer._trial():
        try:
            model, optimizer = trainer._copies_of(model, trainer.options.optimizer)
        except Exception as error:
            name = type(model).__name__
            raise BadSettings(f"{name} cannot be copied for a trial ({error}): give batch_size=") from error
        try:
            _trainer_of(trainer, batch, micro, optimizer).fit(model, data)
        except LossIsNotANumber:  # after its step
            return True
        except Exception as error:
            if not isinstance(error, MemoryError) and not trainer._is_out_of_memory(error):
                raise
            return False
    return True


def _trainer_of(trainer: BaseTrainer, batch: int, micro: int | None, optimizer: Any) -> BaseTrainer:
    """The same trainer for a few steps, without files and callbacks; an average of the weights takes memory."""
    step = trainer.options.step
    if micro is not None:
        step = dataclasses.replace(step, micro_batch_size=micro, accumulate=1)
    callbacks = [callback for callback in trainer._callbacks() if callback.averaging is not None]
    trainer = copy.copy(trainer)
    vars(trainer).update(batch_size=batch, step=step, optimizer=optimizer, callbacks=callbacks, loggers=())
    vars(trainer).update(max_epochs=_STEPS, limits=Limits(max_steps=_STEPS), metrics=None, quiet=True)
    vars(trainer).update(checkpoints=Checkpoints(), run=None, resume=None)
    return trainer
