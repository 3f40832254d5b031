"""A worker process: waits for jobs, runs its rank of each, and reports the progress.

Started by :mod:`.pool`: forked from a process that has loaded PyTorch (:mod:`.fork_server`), or for a GPU as
``python -m manyhands.training.torch.workers.worker ADDRESS RANK``. It does not import the caller's main module, so
scripts need no ``if __name__ == "__main__"`` and notebooks work, also when the caller has used CUDA already. When the
caller goes away, so does the worker. When the caller is interrupted, one rank is asked for the weights: it ends its job
between two steps and sends them back.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
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
from manyhands.training.torch import evaluation_job
from manyhands.training.torch.job import Job, set_torch_settings
from manyhands.training.torch.learner import Rank, loop_of
from manyhands.training.torch.ranks import world
from manyhands.training.torch.state import job_state
from manyhands.training.torch.workers import job_bytes
from manyhands.training.torch.workers.job_bytes import ANSWER, STOP, STOP_JOB, WISH

_ANSWER_SECONDS = 0.5  # between two looks whether the caller was interrupted while a callback runs


def main(address: str, rank: int) -> None:
    # The caller asks a rank that makes no more steps for its stack.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and ends its workers
    signal.signal(signal.SIGTERM, stopping.current_requests().handle)  # a scheduler may signal every process of a job
    connection = Client(address, authkey=bytes.fromhex(os.environ.pop("MANYHANDS_WORKER_KEY")))
    connection.send(rank)
    jobs: queue.Queue[bytes] = queue.Queue()
    stop_requested = threading.Event()
    answers: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(connection, jobs, answers, stop_requested), daemon=True).start()
    while True:
        _do(jobs.get(), connection, answers, stop_requested)


class _StopRequested(BaseException):
    """Ends a job between two steps."""


def _listen(
    connection: Any, jobs: queue.Queue[bytes], answers: queue.Queue[bytes], stop_requested: threading.Event
) -> None:
    try:
        while True:
            message = connection.recv_bytes()
            if message == STOP_JOB:
                stop_requested.set()
            elif message.startswith(ANSWER):
                answers.put(message.removeprefix(ANSWER))
            elif message.startswith(STOP):
                stopping.current_requests().ask(message.removeprefix(STOP).decode())
            elif message.startswith(WISH):
                stopping.current_requests().wish = json.loads(message.removeprefix(WISH))
            else:
                stopping.current_requests().clear()
                jobs.put(message)
    except (EOFError, OSError):
        os._exit(0)


def _do(message: bytes, connection: Connection, answers: queue.Queue[bytes], stop_requested: threading.Event) -> None:
    def say(event: dict[str, Any]) -> dict[str, Any] | None:
        # Events come between steps only: model and optimizer are those after a whole step.
        connection.send(event)
        answer = None
        while event.get("asks") and answer is None and not stop_requested.is_set():
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=_ANSWER_SECONDS)
        if stop_requested.is_set():
            raise _StopRequested
        return None if answer is None else json.loads(answer)

    try:
        job, place = pickle.loads(message)
        sys.path[:] = place["path"]  # modules beside the caller's script are found on the caller's path alone
        connection.send(_run(job_bytes.loads(job), place, say))
    except BaseException as error:
        connection.send(
            {
                "kind": "error",
                "type": type(error).__name__,
                "text": str(error),
                "traceback": "".join(traceback.format_exception(error)),
            }
        )


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
            return evaluation_job.in_worker(job, here, say)
        loop, worker = loop_of(job, here, say)
        try:
            result = loop.fit()
            worker.update_caller_model()
        except _StopRequested:
            if worker.sharded:  # the ranks stand at different steps: they cannot gather the weights together
                raise
            return {"kind": "stopped", "step": loop.cursor.step, **_final_state(job, worker)}
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
    main(sys.argv[1], int(sys.argv[2]))
