"""Losses and gradients that are NaN: which step, which samples, and what to do about it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from manyhands.errors import LossIsNotANumber
from manyhands.training.data.order import epoch_order
from manyhands.training.running_sums import Figures

if TYPE_CHECKING:
    from manyhands.training.loop import Loop

NAN_HINT = (
    "If the loss is divided by a count (mh.LossSum, or a mean over the labels that are not ignored), the count of this "
    "batch may be 0: give at least 1. Else a smaller learning rate or gradient_clip_val may help; "
    "step=mh.Step(on_nan='continue') continues without the batch"
)
_LISTED = 8  # samples of a batch that an error lists


def check(loop: Loop, figures: Figures) -> None:
    """Raise an error where a step had no finite loss, unless the job is to continue."""
    if figures.bad_step is None or loop.settings.step.on_nan == "continue":
        return
    why: str | None = getattr(loop.learner, "why_no_numbers", lambda: None)()  # PyTorch's, with fp16
    if why is not None:
        raise LossIsNotANumber(f"{why}. It is step {figures.bad_step}")
    raise LossIsNotANumber(f"{describe(loop, figures.bad_step)}. {_bad_samples(loop, figures.bad_step) or NAN_HINT}")


def describe(loop: Loop, step: int) -> str:
    """Which step of the current epoch it is, and which samples are in its batch."""
    numbers = _samples_of(loop, step)
    which = f"batch {loop.cursor.batch - (loop.cursor.step - step)} of the loader"
    if numbers is not None:
        which = f"samples {', '.join(map(str, numbers[:_LISTED]))}{', ...' if len(numbers) > _LISTED else ''}"
    return f"the loss or a gradient of step {step} is not a number (epoch {loop.cursor.epoch + 1}, {which})"


def _bad_samples(loop: Loop, step: int) -> str | None:
    """Which samples of a step have NaN, in words, if the learner can read them again."""
    look, numbers = getattr(loop.learner, "bad_samples", None), _samples_of(loop, step)
    if look is None or numbers is None:
        return None
    with contextlib.suppress(Exception):  # the error about the loss matters more
        words: str | None = look(numbers)
        return words
    return None


def _samples_of(loop: Loop, step: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    size, data = loop.settings.batch_size, loop.learner.data
    if data.count is None:
        return None
    batch = loop.cursor.batch - (loop.cursor.step - step)
    epoch = 0 if loop.settings.limits.overfit_batches is not None else loop.cursor.epoch
    order = epoch_order(loop.settings.seed, epoch, data.count, shuffle=data.shuffle)
    return order[batch * size : (batch + 1) * size]
