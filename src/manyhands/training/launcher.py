"""A job of several processes, as a launcher's environment describes it: torchrun and the like, or SLURM.

torchrun sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``: which process this is, of how many, and
where they meet; ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` say the same for one machine. The tasks of an ``srun`` have
``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS``, ``SLURM_LOCALID`` and the list of nodes, whose first is where they meet;
``MASTER_ADDR`` and ``MASTER_PORT`` may say otherwise. Every framework's trainer reads these.

A single task is a plain job, and so is what runs in a batch script without ``srun``, or in an interactive shell.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from manyhands.errors import BadSettings

_STEP_IDS = ("SLURM_STEP_ID", "SLURM_STEPID")  # set by srun; a batch script does not have them


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """Which process of the job this is."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    # Whether the process sees its own GPUs only (SLURM's --gpus-per-task), and not all of the machine's.
    sees_own_gpus: bool = False


def is_launched() -> bool:
    """Whether a launcher has set up this process as one of several."""
    return size() > 0


def size() -> int:
    """How many processes a launcher has started; 0 without one."""
    if _is_torchrun():
        return _number("WORLD_SIZE")
    in_step = "SLURM_PROCID" in os.environ and any(name in os.environ for name in _STEP_IDS)
    tasks = _tasks() if in_step and "RANK" not in os.environ else 1
    return tasks if tasks > 1 else 0


def is_first() -> bool:
    """Whether this process is the one that writes and shows things."""
    return not is_launched() or _number("RANK" if _is_torchrun() else "SLURM_PROCID") == 0


def place() -> LaunchedProcess:
    """This process's place in the job, from the launcher's environment; the default port is torch.distributed's."""
    if _is_torchrun():
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        local_rank, local_size = _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", size)
        return LaunchedProcess(
            rank, size, local_rank, local_size, os.environ["MASTER_ADDR"], _number("MASTER_PORT", 29500)
        )
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    address = os.environ.get("MASTER_ADDR") or first_node(nodes)
    if not address:
        raise BadSettings("SLURM's environment names no nodes (SLURM_JOB_NODELIST): set MASTER_ADDR to the first one")
    port = _number("MASTER_PORT", 12000 + 2 * (_number("SLURM_JOB_ID", 0) % 10000))
    local_rank, own_gpus = _number("SLURM_LOCALID"), _number("SLURM_GPUS_PER_TASK", 0) > 0
    return LaunchedProcess(_number("SLURM_PROCID"), _tasks(), local_rank, _on_node(), address, port, own_gpus)


def device_names(kind: str, per_rank: int = 1) -> list[str]:
    """The devices of a launched job: those of other processes are known by their rank only.

    ``gpu of rank 0``, ``gpu of rank 1``; with several each ``gpu:0 of rank 0``, ``gpu:1 of rank 0``, ...
    """
    numbers = [f":{number}" for number in range(per_rank)] if per_rank > 1 else [""]
    return [f"{kind}{number} of rank {rank}" for rank in range(size()) for number in numbers]


def _is_torchrun() -> bool:
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def _number(name: str, default: int | None = None) -> int:
    """A number in the environment."""
    text = os.environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise BadSettings(f"{name}={text!r} in the environment: the launcher sets a whole number there") from None


# SLURM


def _tasks() -> int:
    return _number("SLURM_STEP_NUM_TASKS", _number("SLURM_NTASKS", 1))


def _on_node() -> int:
    """The tasks of this node: SLURM writes those of all nodes as ``2(x3),1``."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    node = _number("SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else _tasks()


def first_node(text: str) -> str:
    """The first name in a list of nodes as SLURM writes it.

    >>> [first_node(text) for text in ("node[01-03,07],gpu5", "rack[1-2]n[8-9]", "gpu5,gpu6", "")]
    ['node01', 'rack1n8', 'gpu5', '']
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", text).partition(",")[0].strip()
