"""Writing a rank's checkpoint, and going on from one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from manyhands.errors import CheckpointNotWritten
from manyhands.training import checkpoint
from manyhands.training.order import Cursor
from manyhands.training.torch import state

if TYPE_CHECKING:
    from manyhands.training.torch.rank import Rank


def save(rank: Rank) -> None:
    """Write a checkpoint of this moment; every rank takes part, the first one writes."""
    if rank.job.run is None:
        return
    figures = rank.metrics.read()
    rank.check_numbers(figures)
    rank.share_buffers()
    whole = rank.over_all_ranks(figures)
    generators = rank.world.gather(state.random_state(rank.world.device))
    if rank.run is None:
        return
    tensors, numbers = state.optimizer_state(rank.optimizer)
    blobs = {
        "model": state.pack(state.model_tensors(rank.model)),
        "optimizer": state.pack(tensors),
        "random": state.pack({str(number): one for number, one in enumerate(generators)}),
    }
    cursor = {"epoch": rank.cursor.epoch, "sample": rank.cursor.sample, "batch": rank.cursor.batch}
    content = {
        "cursor": {**cursor, "step": rank.cursor.step},
        "settings": rank.settings.as_dict(),
        "samples": rank.train.count,
        "world": rank.world.size,
        "device": rank.world.device.type,
        "optimizer": numbers,
        "partial": [json_number(one) for one in (whole.loss_sum, whole.right, whole.count)],
        "shares": rank.shares,
    }
    try:
        checkpoint.save(rank.run.checkpoints, rank.cursor.step, content, blobs, keep=rank.settings.keep_checkpoints)
    except CheckpointNotWritten as error:
        rank.say({"kind": "warning", "text": f"{error}; the training goes on, the older checkpoint stays"})


def restore(rank: Rank, path: Path) -> None:
    """Go on where a checkpoint stands; on another number of devices too."""
    found = checkpoint.load(path)
    saved = found.state
    state.check_fits(saved, rank.settings, rank.train.count)
    state.restore_model(rank.model, found.blobs["model"])
    state.restore_optimizer(rank.optimizer, found.blobs["optimizer"], saved["optimizer"])
    rank.cursor = Cursor(**saved["cursor"])
    if rank.world.first and saved["partial"][2]:
        rank.metrics.sums[:3] = torch.tensor([math.nan if one is None else one for one in saved["partial"]])
    same_world = (saved["world"], saved["device"]) == (rank.world.size, rank.world.device.type)
    if same_world:
        generators = state.unpack(found.blobs["random"])
        state.restore_random_state(generators[str(rank.world.rank)], rank.world.device)
        rank.shares = saved["shares"]
    else:
        torch.manual_seed(mixed_seed(rank.settings.seed, rank.world.rank, rank.cursor.step))
    if rank.run is not None:
        rank.run.truncate_metrics(rank.cursor.step)
        rank.result.rows = [row for row in rank.run.metrics() if "epoch" in row]
        checkpoint.drop_after(rank.run.checkpoints, rank.cursor.step)


def mixed_seed(*parts: int) -> int:
    """One seed of several numbers, well mixed."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def json_number(value: float) -> float | None:
    """A float as JSON can hold it."""
    return value if math.isfinite(value) else None
