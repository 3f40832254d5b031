"""What counting right answers on several devices needs in every framework: shards, and that each sample counts once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from manyhands import shares, tree
from manyhands.device import Device
from manyhands.errors import BadBatch, DeviceMismatch, NotATensor
from manyhands.placement.moves import Placement

D = TypeVar("D")


def check_model(is_one: bool, net: object, kind: str) -> None:
    """Only a model, of the framework's ``kind``, can have copies on several devices."""
    if not is_one:
        raise NotATensor(
            f"a {type(net).__name__} cannot be copied to several devices, a {kind} can: "
            "evaluate_accuracy_gpu takes any function"
        )


def all_gpus(place: Placement[Any, D, Any]) -> list[D]:
    """All GPUs (or what stands in for them), or the CPU where there is none."""
    return [place.backend.gpu(i) for i in range(place.backend.num_gpus())] or [place.backend.cpu()]


def destination(place: Placement[Any, D, Any], on: Sequence[D], device: D | Device | str) -> D:
    """Where samples go that are to go to a device: the net, which is ``on`` these, has to be there."""
    native = place.existing(device)
    homes = [place.backend.neutral(one) for one in on]
    if homes and place.backend.neutral(native) not in homes:
        raise DeviceMismatch(
            f"the net is on {homes[0]} and its samples were to go to {place.backend.neutral(native)}: "
            "move the net there first (mh.to(net, device)), or name no device"
        )
    return native


def split(place: Placement[Any, Any, Any], X: Any, y: Any, devices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Shards of ``X`` and of ``y`` as even as can be, in order, each on its device."""
    leaves, structure = tree.flatten((X, y))
    total = place.lengths(leaves, structure)[0][1]
    pairs, start = [], 0
    for device, size in zip(devices, shares.sizes(total, len(devices)), strict=True):
        pairs.append(structure.unflatten(place.shard(leaf, start, start + size, device) for leaf in leaves))
        start += size
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def check_whole(X_shards: Sequence[Any], y_shards: Sequence[Any], y: Any, devices: Sequence[Any]) -> None:
    """What ``split_f`` gave is one shard per device, and together the whole batch."""
    if not len(X_shards) == len(y_shards) == len(devices):
        raise BadBatch(f"split_f gave {len(X_shards)} and {len(y_shards)} shards for {len(devices)} devices")
    given = sum(labels(shard) for shard in y_shards)
    if given != labels(y):
        raise BadBatch(
            f"split_f made shards with {given} labels of a batch with {labels(y)}: every sample has to be counted once"
        )


def labels(y: Any) -> int:
    """How many labels there are in an array of them."""
    return math.prod(map(int, y.shape))


def part(correct: int, counted: int) -> float:
    if not counted:
        raise BadBatch("there was no sample to evaluate on: was the iterator used up before?")
    return correct / counted
