"""A job of several processes, as the environment of a launcher (torchrun and its like) tells of it.

``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` say which process this is, of how many, and where they
meet; ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` the same for one machine. Every framework's trainer reads these.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from manyhands.errors import BadSettings

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True, slots=True)
class Place:
    """Which process of the job this is."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int


def is_there() -> bool:
    """Whether a launcher has set up this process as one of several."""
    return all(name in os.environ for name in _NEEDED)


def place() -> Place:
    """What the launcher says; the ports of :mod:`torch.distributed` are its default."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", rank))
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        port = int(os.environ.get("MASTER_PORT", "29500"))
    except ValueError as error:
        raise BadSettings(
            f"RANK, WORLD_SIZE and their like in the environment must be whole numbers: {error}"
        ) from None
    return Place(rank, size, local, on_node, os.environ["MASTER_ADDR"], port)


def device_names(kind: str, per_rank: int = 1) -> list[str]:
    """The devices of a launched job: those of other processes are known by their rank only.

    ``gpu of rank 0``, ``gpu of rank 1``; with several each ``gpu:0 of rank 0``, ``gpu:1 of rank 0``, ...
    """
    numbers = [f":{number}" for number in range(per_rank)] if per_rank > 1 else [""]
    return [f"{kind}{number} of rank {rank}" for rank in range(size()) for number in numbers]


def is_first() -> bool:
    """Whether this process is the one that writes and shows things."""
    return not is_there() or int(os.environ["RANK"]) == 0


def size() -> int:
    """How many processes a launcher has started; 0 without one."""
    return int(os.environ["WORLD_SIZE"]) if is_there() else 0
