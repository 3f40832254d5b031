"""A rank's part of a checkpoint: weights, optimizer, random numbers, attributes of modules, parts of the step.

All ranks take part in both directions. Only the first one holds what is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from manyhands.training.checkpoints import saving
from manyhands.training.learner import Saved
from manyhands.training.running_sums import Totals
from manyhands.training.torch.state import job_state, module_state, randomness

if TYPE_CHECKING:
    from manyhands.training.torch.learner import Rank


def save(rank: Rank) -> Saved | None:
    """The state of this moment, at the first rank."""
    world = rank.world
    rank.replicas.check()
    rank.share_buffers()
    generators = world.values(job_state.pack(randomness.as_tensors(world.device)))
    devices = world.values(world.device.type)
    weights = rank.replicas.whole(job_state.model_tensors(rank.model))
    tensors, numbers = job_state.optimizer_state(rank.optimizer)
    tensors = rank.replicas.whole(tensors)
    if not world.first:
        return None
    random = {
        f"{number}.{name}": state
        for number, blob in enumerate(generators)
        for name, state in job_state.unpack(blob).items()
    }
    of_parts: dict[str, Any] = {}
    blobs_of_parts: dict[str, bytes] = {}
    for part in rank.steps.plain.parts:
        state, blobs = part.state_to_save()
        of_parts |= state
        blobs_of_parts |= blobs
    attributes, module_tensors, notes = rank.module_state.save()
    rank.notes += [note for note in notes if note not in rank.notes]
    return Saved(
        state={
            "module_state": attributes,
            "world": world.size,
            "devices": devices,
            "half": rank.number_format.autocast is torch.bfloat16,
            **of_parts,
            "optimizer": numbers,
            "scheduler": None if rank.scheduler is None else rank.scheduler.state(),
            "optimizer_groups": job_state.optimizer_groups(rank.optimizer),
            "optimizer_parameters": job_state.parameter_names(rank.optimizer, rank.model),
        },
        blobs={
            "model": job_state.pack(weights),
            "optimizer": job_state.pack(tensors),
            "random": job_state.pack(random),
            "module_state": module_tensors,
            **blobs_of_parts,
        },
    )


def restore(rank: Rank, saved: Mapping[str, Any], blobs: Mapping[str, bytes], totals: Totals) -> None:
    """Continue from a checkpoint, maybe on other devices."""
    job_state.restore_model(rank.model, blobs["model"])
    if "module_state" in saved:
        module_state.restore(rank.model, saved["module_state"], blobs["module_state"])
        rank.begin_anew()  # maybe other parameters are trained
    if rank.scheduler is not None and saved.get("scheduler") is not None:
        rank.scheduler.restore(saved["scheduler"])
    if "optimizer" in blobs:  # weights from another framework come alone
        job_state.restore_optimizer(
            rank.optimizer,
            blobs["optimizer"],
            saved["optimizer"],
            saved.get("optimizer_groups", ()),
            lambda name: saving.is_kept(name, rank.optimizer_options, saved),
            (job_state.parameter_names(rank.optimizer, rank.model), saved.get("optimizer_parameters", ())),
        )
    notes = [part.restore(saved, blobs) for part in rank.steps.plain.parts]
    rank.notes += [note for note in notes if note is not None]
    devices = rank.world.values(rank.world.device.type)
    _restore_randomness(rank, saved, blobs)
    rank.steps.half_before = saved.get("half")
    if devices == saved.get("devices", []) and rank.settings.step.shares == "measured":
        rank.feed.division.shares = saved["shares"]
    rank.metrics.restore(totals)


def _restore_randomness(rank: Rank, saved: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
    """The rank's generators as they were; on other devices they begin anew, by seed, rank and step."""
    world, devices = rank.world, saved.get("devices", [])
    if devices[world.rank : world.rank + 1] == [world.device.type] and saved["world"] == world.size:
        prefix, states = f"{world.rank}.", job_state.unpack(blobs["random"])
        own_states = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
        randomness.restore(own_states, world.device)
    else:
        step = saved["cursor"]["step"]
        randomness.seed_all(randomness.mixed_seed(rank.settings.seed, world.rank, step))
