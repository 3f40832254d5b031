"""Measures the link between this machine's devices: all-reduces between processes, as ranks make them.

``python -m manyhands.training.torch.predict.measured_link FOLDER RANK SIZE KIND`` is one of these processes; the first
writes what it saw. A small sum gives the latency of a hop, one of a bucket's size the bandwidth; each for two ranks and
for all of them.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from manyhands import machine
from manyhands.errors import BadSettings, WorkerFailed
from manyhands.predict.link import Link
from manyhands.predict.profile import BUCKET

_SMALL, _TRIALS, _SECONDS = 8, 7, 300
_ANSWER = "link.json"
_MOST_ON_CPU = 4


def measure(kind: str, most: int) -> Link:
    """The link between GPUs (``kind`` "gpu") or between ranks on the CPU, up to ``most`` of them."""
    count = torch.cuda.device_count() if kind == "gpu" else _MOST_ON_CPU
    if count < 2:
        raise BadSettings(
            f"link 'measured' needs two devices to measure between, and there is {count} GPU: name a link, as 'nvlink'"
        )
    size = max(2, min(most, count))
    with tempfile.TemporaryDirectory("-manyhands") as folder:
        threads = str(max(1, machine.usable_cores() // size))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "manyhands.training.torch.predict.measured_link", folder]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), kind],
                env=environment,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
            )
            for rank in range(size)
        ]
        try:
            for rank, process in enumerate(ranks):
                _, errors = process.communicate(timeout=_SECONDS)
                if process.returncode:
                    last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
                    raise WorkerFailed(f"the link could not be measured: rank {rank} failed: {last[0]}")
            seen = json.loads((Path(folder) / _ANSWER).read_text())
        except subprocess.TimeoutExpired as error:
            raise WorkerFailed(f"the link could not be measured within {_SECONDS} seconds") from error
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    pairs = tuple((int(ranks), float(speed)) for ranks, speed in seen["bandwidths"])
    return Link("measured", "measured", pairs, 1 << 30, None, float(seen["hop"]))


def _rank(folder: str, rank: int, size: int, kind: str) -> None:
    device = torch.device("cuda", rank) if kind == "gpu" else torch.device("cpu")
    if kind == "gpu":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "gpu" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=_SECONDS),
    )
    pair = dist.new_group([0, 1])
    small = torch.zeros(_SMALL, device=device)
    large = torch.zeros(BUCKET // 4, device=device)
    bandwidths, hop = [], 0.0
    for ranks, group in ((2, pair), (size, dist.group.WORLD)):
        if rank < ranks and (ranks > 2 or group is pair):
            latency, whole = _seconds(small, group), _seconds(large, group)
            bandwidths.append((ranks, BUCKET * 2 * (ranks - 1) / ranks / max(whole - latency, 1e-9)))
            hop = hop or latency / (2 * (ranks - 1))
        dist.barrier()
    if rank == 0:
        (Path(folder) / _ANSWER).write_text(json.dumps({"bandwidths": bandwidths, "hop": hop}))
    dist.destroy_process_group()


def _seconds(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """The median of several all-reduces, after one that does not count."""
    trials = []
    for _ in range(_TRIALS + 1):
        dist.barrier(group)
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if tensor.device.type == "cuda":
            torch.cuda.synchronize()
        trials.append(time.perf_counter() - start)
    return statistics.median(trials[1:])


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
