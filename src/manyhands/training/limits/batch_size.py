"""The largest batch that fits: doubled until one does not, then halved in between.

::

    tried     8   16   32   64   128   96   112   104      8 to 64 fit, 128 does not
    fits      *    *    *    *     -    *     -     *      104 is given: within an eighth of the largest
"""

from __future__ import annotations

from collections.abc import Callable

from manyhands.errors import BadSettings

_FIRST = 8  # samples per device
_NEAR = 8  # the answer is within this part of the largest that fits


def largest(fits: Callable[[int], bool], maximum: int, devices: int) -> int:
    """The largest size up to ``maximum`` that fits, or one near it; a multiple of ``devices`` where it is not that."""
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
