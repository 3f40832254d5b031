"""``Trainer.find_batch_size``: real steps on copies of the model, with larger and larger batches.

The size is doubled until a batch does not fit, then bisected::

    tried     8   16   32   64   128   96   112   104      8 to 64 fit, 128 does not
    fits      *    *    *    *     -    *     -     *      104 is the answer: within an eighth of the largest

A GPU raises an error when its memory is full. A host does not: it swaps, or kills the process. So on a CPU the search
needs a maximum.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from manyhands import shares as _shares
from manyhands.amounts import count_of
from manyhands.errors import BadSettings, LossIsNotANumber
from manyhands.training import launcher
from manyhands.training.options import Checkpoints, Limits, Workers, check_count

if TYPE_CHECKING:
    from manyhands.training.trainer import BaseTrainer

_FIRST = 8  # samples per device
_NEAR = 8  # the answer is within this part of the largest that fits
_STEPS = 3  # the first ones make the optimizer's state


def find(trainer: BaseTrainer, model: Any, maximum: int | None, of: Literal["batch", "micro_batch"]) -> int:
    """The largest batch of a trainer, or the largest micro-batch of its batch."""
    if not trainer.searches_batch_size:
        raise BadSettings("find_batch_size is there in PyTorch and in JAX: here try some sizes, as batch_size=64")
    if of not in ("batch", "micro_batch"):
        raise BadSettings(f"find_batch_size(of={of!r}): choose one of batch, micro_batch")
    if maximum is not None:
        check_count(maximum, f"find_batch_size(maximum={maximum!r})")
    if launcher.size() > 1:
        raise BadSettings("find_batch_size: call it in one process, not under a launcher, and give batch_size= there")
    data = trainer.train_source
    if data.count is None:
        raise BadSettings("find_batch_size: a loader has its own batches: give (X, y) instead, or in PyTorch a Dataset")
    if maximum is None and any(trainer.backend.neutral(device).kind == "cpu" for device in trainer._natives()):
        raise BadSettings("find_batch_size on a CPU, where no error says that memory is full: give maximum=")
    search, devices = _BatchSizeSearch(trainer, model), len(trainer._natives())
    if of == "micro_batch":
        whole = trainer._settings_with(trainer.options.batch_size or data.batch_size).batch_size
        shard = max(search.shards(whole))
        return largest(lambda size: search.fits(whole, size), min(int(maximum or shard), shard), 1)
    most = min(int(maximum or data.count), data.count)
    if most < devices:
        raise BadSettings(
            f"{count_of(most, 'sample')} for {count_of(devices, 'device')}: each needs at least one, so give a larger "
            "maximum"
        )
    return largest(lambda size: search.fits(size, None), most, devices)


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


class _BatchSizeSearch:
    """One search: its trainer and model."""

    def __init__(self, trainer: BaseTrainer, model: Any) -> None:
        self.trainer, self.model = trainer, model
        self.devices = trainer._natives()

    def shards(self, batch: int) -> list[int]:
        """How many samples of a batch each device gets; measured shares begin as equal ones."""
        return _shares.sizes(batch, len(self.devices), self.trainer._settings_with(batch).fixed_shares)

    def fits(self, batch: int, micro: int | None) -> bool:
        """Whether a few steps succeed, over all devices at once, or in PyTorch on each device with its own shard.

        There devices are processes: one without memory left would keep the others waiting.
        """
        if not self.trainer.tries_devices_alone:
            return self._try(self.devices, batch, micro)
        largest_shards: dict[Any, int] = {}
        for device, size in zip(self.devices, self.shards(batch), strict=True):
            largest_shards[device] = max(largest_shards.get(device, 1), size)
        return all(self._try([device], shard, micro) for device, shard in largest_shards.items())

    def _try(self, devices: list[Any], batch: int, micro: int | None) -> bool:
        """Whether a few steps could be made."""
        trainer, data = self.trainer, dataclasses.replace(self.trainer.train_source, batch_size=None)
        try:
            with trainer._trial(devices):
                try:
                    model, optimizer = trainer._copies_of(self.model, trainer.options.optimizer)
                except Exception as error:
                    raise BadSettings(
                        f"find_batch_size makes steps on a copy, and {type(self.model).__name__} cannot be copied "
                        f"({type(error).__name__}: {error}): give batch_size="
                    ) from error
                self._trainer_of(devices, batch, micro, optimizer).fit(model, data)
        except LossIsNotANumber:  # after its step
            return True
        except MemoryError:
            return False
        except Exception as error:
            if not trainer._is_out_of_memory(error):
                raise
            return False
        finally:
            model = optimizer = None
            gc.collect()
        return True

    def _trainer_of(self, devices: list[Any], batch: int, micro: int | None, optimizer: Any) -> BaseTrainer:
        """The same trainer for a few steps, without files and callbacks; an average of the weights takes memory."""
        trainer, step = copy.copy(self.trainer), self.trainer.options.step
        if micro is not None:
            step = dataclasses.replace(step, micro_batch_size=micro, accumulate=1)
        if self.trainer.tries_devices_alone:
            step = dataclasses.replace(step, shares=None)
            vars(trainer).pop("ranks", None)
            vars(trainer).update(devices=devices, workers=Workers())
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
