"""Callbacks with several processes: they run in one of them. Under torchrun: ranks/test_torchrun.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from manyhands.training.torch.workers import pool


class Answers:
    """The end of a worker's connection."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_the_time_of_a_callback_is_no_silence_of_a_worker() -> None:
    """Workers that wait for an answer do not hang."""
    workers: list[Any] = [pool._Worker(rank, "cpu", None, Path(), Answers(), heard=1000.0) for rank in range(2)]  # type: ignore[arg-type]
    own = pool.Pool([], workers=workers)

    def say(event: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.05)
        return {"stop": None, "save": []}

    own._pass_on(workers[0], {"kind": "evaluation", "asks": True}, say)
    assert all(worker.heard >= 1000.05 for worker in workers)
    assert workers[0].connection.sent == [("answer", {"stop": None, "save": []})]
    assert not workers[1].connection.sent
    own._pass_on(workers[0], {"kind": "steps"}, lambda event: None)
    assert len(workers[0].connection.sent) == 1
    own._pass_on(workers[0], {"kind": "steps"}, say)
    assert len(workers[0].connection.sent) == 1
    own._pass_on(workers[0], {"kind": "steps"}, lambda event: {"stop": "enough"})
    assert workers[0].connection.sent[1:] == [("wish", {"stop": "enough"})]
