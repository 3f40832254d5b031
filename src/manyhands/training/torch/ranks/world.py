"""The processes of a job, as one of them sees them.

A world of one runs in the calling process and knows nothing of process groups. A larger one is a
torch.distributed group: NCCL where every rank has a GPU to itself, else Gloo (CPUs, several ranks on one GPU, CPUs
and GPUs in one job).
"""

from __future__ import annotations

import datetime
import functools
import gc
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from manyhands.training import launcher
from manyhands.training.torch.state import job_state

# How long a collective may wait for the other ranks, in hang_seconds. In a pool longer than it takes to detect a hang,
# so that the message names the rank that hangs.
PATIENCE_IN_POOL = 30
PATIENCE_UNDER_LAUNCHER = 10
_MEETING_SECONDS = 300
_jobs = itertools.count()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    device: torch.device
    # Whether the process group was made here; one that the caller has made stays.
    own_group: bool = True

    @property
    def first(self) -> bool:
        return self.rank == 0

    def broadcast_(self, tensors: list[torch.Tensor], source: int = 0) -> None:
        """Copy the tensors of the source rank into those of every rank."""
        if self.size > 1:
            for tensor in tensors:
                dense = tensor.detach().contiguous()
                if dense.numel():
                    # As bytes: Gloo does not know every dtype.
                    dist.broadcast(dense.reshape(-1).view(torch.uint8), source)
                    if dense.data_ptr() != tensor.data_ptr() or dense.stride() != tensor.stride():
                        job_state.write(tensor, dense)

    def value_of_first(self, value: T) -> T:
        """The value of the first rank; those of the others are ignored."""
        sent = [value]
        if self.size > 1:
            dist.broadcast_object_list(sent)
        return sent[0]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """One tensor from each rank, on the host of every rank. Same shape and dtype everywhere."""
        if self.size == 1:
            return [tensor.cpu()]
        staged = tensor.to(self.device)
        gathered = [torch.empty_like(staged) for _ in range(self.size)]
        dist.all_gather(gathered, staged)
        return [part.cpu() for part in gathered]

    def values(self, value: T) -> list[T]:
        """The value of each rank."""
        gathered = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, value)
        return gathered

    def values_at_first(self, value: T) -> list[T]:
        """The value of each rank, at the first; an empty list elsewhere."""
        gathered = [value] * self.size if self.first else []
        if self.size > 1:
            dist.gather_object(value, gathered or None)
        return gathered

    def all_have(self, number: int) -> bool:
        """Whether every rank has this number."""
        return self.size == 1 or all(int(gathered) == number for gathered in self.gather(torch.tensor([number])))


def join(rank: int, size: int, device: torch.device, backend: str, *, address: str | None, seconds: float) -> World:
    """Become a rank of the job; ``address`` is where the ranks meet (None: torchrun's environment tells)."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size(), device, own_group=False)
    if size > 1:
        timeout = datetime.timedelta(seconds=seconds)
        place: dict[str, Any] = (
            {"init_method": address} if address else {"store": _launchers_store(rank, size, timeout)}
        )
        _keep_groups_from_forks()
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, **place)
    return World(rank, size, device)


@functools.cache
def _keep_groups_from_forks() -> None:
    """Worker processes of a DataLoader, which are forks of this one, never collect what they inherit.

    A process group that was destroyed lies in a cycle until the garbage collector comes by. Where it comes by in a
    fork, the group's destructor takes its sockets out of the epoll of Gloo, which parent and forks share: the second
    fork to do so is aborted ("epoll_ctl: No such file or directory").
    """
    os.register_at_fork(after_in_child=gc.freeze)


def from_first(make: Callable[[], Any]) -> Any:
    """The value, JSON, that ``make`` returns at the first rank of a launcher; without a launcher, that of this call."""
    if not launcher.is_launched():
        return make()
    here = launcher.place()
    store = _launchers_store(here.rank, here.size, datetime.timedelta(seconds=_MEETING_SECONDS))
    if here.rank == 0:
        store.set("said", json.dumps(make()))
    return json.loads(store.get("said"))


def _launchers_store(rank: int, size: int, timeout: datetime.timedelta) -> Store:
    """Where the ranks of a launcher meet, with a place of its own for every restart and every job.

    The launcher's store outlives a restart: without it, ranks would find the addresses of processes that are gone.
    """
    store = _open_store(rank, size)
    store.set_timeout(timeout)
    return PrefixStore(f"manyhands/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_jobs)}", store)


@functools.cache
def _open_store(rank: int, size: int) -> Store:
    here = launcher.place()
    where = "env://" if "RANK" in os.environ else f"tcp://{here.address}:{here.port}"
    store: Store = next(iter(rendezvous(where, rank, size)))[0]
    return store


def leave(world: World) -> None:
    if world.size > 1 and world.own_group and dist.is_initialized():
        dist.destroy_process_group()


def backend_for(devices: list[torch.device]) -> str:
    """NCCL where every rank has a GPU to itself, else Gloo."""
    own_gpus = all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices)
    return "nccl" if own_gpus and dist.is_nccl_available() else "gloo"
