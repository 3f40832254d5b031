"""``evaluate`` and ``predict`` of PyTorch's trainer: what a rank does for them, and how the caller's model is left.

A job with this purpose goes the way of a training: it runs in the calling process on one device, in worker processes on
several, or in the processes of a launcher. Workers send their outputs back in pieces, through the first rank.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch

from manyhands.training.evaluation.metrics import evaluate_with_metrics, ignore_progress, named_results
from manyhands.training.learner import Say, Take
from manyhands.training.torch.data import feed
from manyhands.training.torch.evaluation import Evaluation
from manyhands.training.torch.job import HALVES, Job, placement_preserved
from manyhands.training.torch.objective import placed
from manyhands.training.torch.ranks.world import World
from manyhands.training.torch.state import randomness
from manyhands.training.torch.step.number_format import NumberFormat
from manyhands.training.torch.workers import job_bytes

_ALIVE_EVERY = 0.2  # seconds


def computed(job: Job, here: World, take: Take | None, alive: Callable[[], None]) -> dict[str, Any] | None:
    """This rank's part: returns the figures over all ranks; a prediction goes to ``take`` and returns None."""
    precision = job.settings.precision
    number_format = NumberFormat(HALVES.get(precision), dtype=torch.float64 if precision == "fp64" else None)
    model = job.model.to(here.device, number_format.dtype)
    here.broadcast_([*model.parameters(), *model.buffers()])
    randomness.seed_all(randomness.mixed_seed(job.settings.seed, here.rank))
    data = feed.resident(job.train, here.device)
    evaluation = Evaluation(model, here, number_format, job.settings.batch_size, data, job.objective)
    if job.purpose == "predict":
        assert take is not None
        evaluation.predict(job.inputs, alive, take)
        return None
    evaluation.objective = placed(job.objective, here.device, number_format.dtype)
    figures, values = evaluate_with_metrics(evaluation, job.metrics, alive)
    assert figures is not None
    return named_results(figures, values)


def in_process(job: Job, here: World, take: Take | None) -> dict[str, Any] | None:
    """In the calling process; the model, and the caller's random numbers, are then as they were."""
    with randomness.preserved(here.device), placement_preserved(job.model):
        return computed(job, here, take, ignore_progress)


def in_worker(job: Job, here: World, say: Say) -> dict[str, Any]:
    """In a worker process: returns its last message. Outputs are sent before, piece by piece."""
    spoke = 0.0

    def alive() -> None:
        nonlocal spoke
        if time.monotonic() - spoke > _ALIVE_EVERY:
            spoke = time.monotonic()
            say({"kind": "alive", "step": 0})

    def send(outputs: Any, _: Any) -> None:
        say({"kind": "outputs", "step": 0, "bytes": job_bytes.dumps(outputs)})

    alive()
    return {"kind": "done", "step": 0, "figures": computed(job, here, send, alive)}


def with_workers(job: Job, ranks: list[torch.device], take: Take | None) -> dict[str, Any] | None:
    """The caller's side of a job in worker processes."""
    from manyhands.training.torch.workers import pool

    def event(event: dict[str, Any]) -> None:
        if event["kind"] == "outputs" and take is not None:
            take(pickle.loads(event["bytes"]), None)

    figures: dict[str, Any] | None = pool.pool_for(ranks).run(job, event)["figures"]
    return figures
