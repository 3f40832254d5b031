"""The search behind ``find_batch_size``: the size is doubled until a batch does not fit, then bisected.

::

    tried     8   16   32   64   128   96   112   104      8 to 64 fit, 128 does not
    fits      *    *    *    *     -    *     -     *      104 is given: within an eighth of the largest
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from manyhands import shares as _shares
from manyhands.amounts import counted
from manyhands.errors import BadSettings

if TYPE_CHECKING:
    from manyhands.training.trainer import BaseTrainer

_FIRST = 8  # samples per device
_NEAR = 8  # the answer is within this part of the largest that fits


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


def find(
    trainer: BaseTrainer,
    data: Any,
    devices: int,
    maximum: int | None,
    fits: Callable[[int, int | None], bool],
    *,
    micro: bool,
) -> int:
    """The largest batch of a trainer, or (``micro``) the largest micro-batch of its batch.

    ``fits(batch, micro_batch)`` tries one; the micro-batch is None where batches are searched for.
    """
    if micro:
        whole = trainer._settings_with(trainer._option("batch_size") or data.batch_size).batch_size
        shard = max(shards(trainer, whole, devices))
        return largest(lambda size: fits(whole, size), min(maximum or shard, shard), 1)
    most = min(maximum or data.count, data.count)
    if most < devices:
        raise BadSettings(
            f"{counted(most, 'sample')} for {counted(devices, 'device')}: each needs at least one, so give a larger "
            "maximum"
        )
    return largest(lambda size: fits(size, None), most, devices)


def shards(trainer: BaseTrainer, batch: int, devices: int) -> list[int]:
    """How many samples of a batch each device gets; measured shares begin as equal ones."""
    return _shares.sizes(batch, devices, trainer._settings_with(batch).fixed_shares)
