"""A worker process: waits for jobs, runs its rank of each, and reports the progress.

Started by :mod:`.pool`: forked from a process that has loaded PyTorch (:mod:`.fork_server`), or for a GPU as
``python -m manyhands.training.torch.workers.worker ADDRESS RANK``. It does not import the caller's main module, so
scripts need no ``if __name__ == "__main__"`` and notebooks work, also when the caller has used CUDA already. When the
caller goes away, so does the worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

import torch

from manyhands.training import stopping
from manyhands.training.learner import Say
from manyhands.training.torch import evaluation
from manyhands.training.torch.job import Job, set_torch_settings
from manyhands.training.torch.learner import Rank, loop_of
from manyhands.training.torch.ranks import world
from manyhands.training.torch.state import job_state, lent_model
from manyhands.training.torch.workers import job_bytes


def main(address: str, rank: int, key: str) -> None:
    # The caller asks a rank that makes no more steps for its stack.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and ends its workers
    signal.signal(signal.SIGTERM, stopping.current_requests().handler())  # a scheduler may signal all processes
    connection = Client(address, authkey=bytes.fromhex(key))
    connection.send(rank)
    caller = _Caller(connection)
    threading.Thread(target=caller.listen, daemon=True).start()
    while True:
        _do(caller, connection)
        gc.collect()  # the parts of a job hold each other, and its data with them


def _do(caller: _Caller, connection: Connection) -> None:
    """Do the next job. A function of its own, so that a worker that waits holds nothing of the job before."""
    try:
        job, place = caller.jobs.get()
        sys.path[:] = place["path"]  # modules beside the caller's script are found on the caller's path alone
        connection.send(_run(job_bytes.loads(job), place, caller.say))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        connection.send({"kind": "error", "type": type(error).__name__, "text": str(error), "traceback": trace})


class _Caller:
    """The caller, at the other end of the connection: its jobs, its answers to events, and its requests to stop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.jobs: queue.Queue[tuple[bytes, dict[str, Any]]] = queue.Queue()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._take(*self._connection.recv())
        os._exit(0)

    def _take(self, kind: str, content: Any) -> None:
        requests = stopping.current_requests()
        if kind == "job":
            requests.clear()
            self.jobs.put(content)
        elif kind == "answer":  # of callbacks, to an event that asks
            self._answers.put(content)
        elif kind == "signal":  # that the caller got: stop after this step
            requests.ask(content)
        elif kind == "wish":  # of callbacks that were not asked: stop the training
            requests.wish = content

    def say(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Send an event; returns the answer to one that asks."""
        if event["kind"] == "model":
            return lent_model.sent(event, self._send)
        return self._send(event)

    def _send(self, event: dict[str, Any]) -> dict[str, Any] | None:
        self._connection.send(event)
        return self._answers.get() if event.get("asks") else None


def _run(job: Job, place: dict[str, Any], say: Say) -> dict[str, Any]:
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
        if job.purpose != "fit":
            return evaluation.in_worker(job, here, say)
        loop, worker = loop_of(job, here, say)
        result = loop.fit()
        worker.update_caller_model()
        final_state = _final_state(job, worker) if here.first else {}
        result.notes = worker.notes
        return {"kind": "done", "step": loop.cursor.step, "result": result, **final_state}
    finally:
        world.leave(here)


def _final_state(job: Job, worker: Rank) -> dict[str, Any]:
    """A rank's final state: the weights, what else the model holds, and the state of the caller's optimizer."""
    final_state: dict[str, Any] = {"weights": job_state.pack(job_state.model_tensors(worker.model))}
    attributes, tensors_beside, notes = worker.module_state.save()
    final_state["module_state"] = attributes, tensors_beside
    worker.notes += notes
    final_state["scheduler"] = None if worker.scheduler is None else worker.scheduler.state()
    if isinstance(job.optimizer, torch.optim.Optimizer):
        tensors, final_state["optimizer_numbers"] = job_state.optimizer_state(worker.optimizer)
        final_state["optimizer"] = job_state.pack(tensors)
        final_state["optimizer_groups"] = job_state.optimizer_groups(worker.optimizer)
    return final_state


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), os.environ.pop("MANYHANDS_WORKER_KEY"))
