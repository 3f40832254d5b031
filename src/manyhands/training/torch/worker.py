"""A worker process: waits for jobs, does its rank of each, and says how it goes.

Started by :mod:`.pool` as ``python -m manyhands.training.torch.worker ADDRESS RANK``. It does not import the
caller's main module, so scripts need no ``if __name__ == "__main__"`` and notebooks work, also when the caller has used
CUDA already. When the caller goes away, so does the worker.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

import cloudpickle
import torch

from manyhands.training.torch import state, world
from manyhands.training.torch.job import Job, set_torch_settings
from manyhands.training.torch.rank import loop_of


def main(address: str, rank: int) -> None:
    # Asked by the caller when this rank makes no step any more: where is it?
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and ends its workers
    connection = Client(address, authkey=bytes.fromhex(os.environ.pop("MANYHANDS_WORKER_KEY")))
    connection.send(rank)
    jobs: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(connection, jobs), daemon=True).start()
    while True:
        _do(jobs.get(), connection)


def _listen(connection: Any, jobs: queue.Queue[bytes]) -> None:
    try:
        while True:
            jobs.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _do(message: bytes, connection: Connection) -> None:
    try:
        job, place = cloudpickle.loads(message)
        connection.send({"kind": "done", **_run(job, place, connection)})
    except BaseException as error:
        connection.send(
            {
                "kind": "error",
                "type": type(error).__name__,
                "text": str(error),
                "traceback": "".join(traceback.format_exception(error)),
            }
        )


def _run(job: Job, place: dict[str, Any], connection: Connection) -> dict[str, Any]:
    torch.set_num_threads(place["threads"])
    set_torch_settings(place["torch"])
    here = world.join(
        place["rank"],
        place["size"],
        torch.device(place["device"]),
        place["backend"],
        address=place["address"],
        seconds=place["seconds"],
    )
    try:
        loop, worker = loop_of(job, here, connection.send)
        result = loop.fit()
        if not here.first:
            return {"result": result}
        home: dict[str, Any] = {"result": result, "weights": state.pack(state.model_tensors(worker.model))}
        if isinstance(job.optimizer, torch.optim.Optimizer):  # the caller has one, too
            tensors, home["optimizer_numbers"] = state.optimizer_state(worker.optimizer)
            home["optimizer"], home["optimizer_groups"] = state.pack(tensors), state.optimizer_groups(worker.optimizer)
        return home
    finally:
        world.leave(here)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
