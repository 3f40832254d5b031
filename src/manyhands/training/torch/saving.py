"""Writing a rank's checkpoint, and going on from one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyhands.errors import CheckpointNotWritten
from manyhands.training import checkpoint
from manyhands.training.order import Cursor
from manyhands.training.torch import metrics, randomness, state
from manyhands.training.torch.world import World

if TYPE_CHECKING:
    from manyhands.training.torch.rank import Rank


def save(rank: Rank) -> None:
    """Write a checkpoint of this moment; every rank takes part, the first one writes."""
    if rank.job.run is None:
        return
    figures = rank.world.gather(metrics.as_tensor(rank.metrics.read()))
    rank.check_numbers(metrics.together(figures))
    rank.share_buffers()
    generators = rank.world.gather_bytes(state.pack(randomness.as_tensors(rank.world.device)))
    devices = _device_types(rank.world)
    if rank.run is None:
        return
    tensors, numbers = state.optimizer_state(rank.optimizer)
    blobs = {
        "model": state.pack(state.model_tensors(rank.model)),
        "optimizer": state.pack(tensors),
        "random": state.pack(
            {
                f"{number}.{name}": one
                for number, all_ in enumerate(generators)
                for name, one in state.unpack(all_).items()
            }
        ),
    }
    cursor = {"epoch": rank.cursor.epoch, "sample": rank.cursor.sample, "batch": rank.cursor.batch}
    content = {
        "cursor": {**cursor, "step": rank.cursor.step},
        "settings": rank.settings.as_dict(),
        "samples": rank.train.count,
        "shuffle": rank.train.shuffle,
        "world": rank.world.size,
        "devices": devices,
        "optimizer": numbers,
        "optimizer_groups": state.optimizer_groups(rank.optimizer),
        "optimizer_type": type(rank.optimizer).__name__,
        "figures": [_figures_as_json(metrics.together([one])) for one in figures],
        "shares": rank.shares,
    }
    rank.say_alive()
    try:
        checkpoint.save(rank.run.checkpoints, rank.cursor.step, content, blobs, keep=rank.settings.keep_checkpoints)
    except CheckpointNotWritten as error:
        rank.say({"kind": "warning", "text": f"{error}; the training goes on, the older checkpoint stays"})
    rank.say_alive()


def _device_types(world: World) -> list[str]:
    """The kind of device of each rank."""
    return [one.decode() for one in world.gather_bytes(world.device.type.encode())]


def restore(rank: Rank, path: Path | None) -> None:
    """Go on where a checkpoint stands, if there is one; on another number of devices too.

    The first rank reads it and sends it to the others, which may be on machines that do not have the file.
    """
    found = checkpoint.load(path) if path is not None and rank.world.first else None
    header = {"state": found.state, "blobs": list(found.blobs)} if found is not None else {}
    header = json.loads(rank.world.bytes_from_first(json.dumps(header).encode()))
    if not header:
        return
    blobs = {name: rank.world.bytes_from_first(found.blobs[name] if found else b"") for name in header["blobs"]}
    saved = header["state"]
    state.check_fits(saved, rank.settings, rank.train, rank.optimizer)
    state.restore_model(rank.model, blobs["model"])
    state.restore_optimizer(rank.optimizer, blobs["optimizer"], saved["optimizer"], saved.get("optimizer_groups", ()))
    rank.cursor = Cursor(**saved["cursor"])
    _restore_own_part(rank, saved, state.unpack(blobs["random"]))
    if rank.run is not None:
        # A row stands at the last step of its epoch: if that epoch is not over yet, it will come again.
        rank.run.truncate_metrics(rank.cursor.step - (1 if rank.cursor.sample else 0))
        rank.result.rows = [row for row in rank.run.metrics() if "epoch" in row]
        checkpoint.drop_after(rank.run.checkpoints, rank.cursor.step)
    rank.result.rows = json.loads(rank.world.bytes_from_first(json.dumps(rank.result.rows).encode()))


def _restore_own_part(rank: Rank, saved: dict[str, Any], generators: dict[str, torch.Tensor]) -> None:
    """What each rank has for itself: figures and random numbers. On other devices the first takes all the figures."""
    here, figures = rank.world, [_figures_from_json(one) for one in saved["figures"]]
    devices, before = _device_types(here), saved.get("devices", [])
    if before[here.rank : here.rank + 1] == [here.device.type] and saved["world"] == here.size:
        own = f"{here.rank}."
        found = {name.removeprefix(own): one for name, one in generators.items() if name.startswith(own)}
        randomness.restore(found, here.device)
    else:
        randomness.seed_all(randomness.mixed_seed(rank.settings.seed, here.rank, rank.cursor.step))
    if devices == before and rank.settings.shares == "measured":
        rank.shares = saved["shares"]
    if saved["world"] == here.size:
        mine = figures[here.rank]
    else:
        everything = metrics.together([metrics.as_tensor(one) for one in figures])
        mine = everything if here.first else metrics.Figures(0.0, 0.0, 0.0, None, everything.counted)
    rank.metrics.restore(mine.loss_sum, mine.right, mine.count, counted=mine.counted)


def _figures_as_json(figures: metrics.Figures) -> list[float | bool | None]:
    return [json_number(figures.loss_sum), figures.right, figures.count, figures.counted]


def _figures_from_json(values: list[Any]) -> metrics.Figures:
    loss, right, count, counted = values
    return metrics.Figures(math.nan if loss is None else loss, right, count, None, counted)


def json_number(value: float) -> float | None:
    """A float as JSON can hold it."""
    return value if math.isfinite(value) else None
