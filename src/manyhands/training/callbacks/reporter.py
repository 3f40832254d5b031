"""The loop's side of callbacks: what happens is reported as events, and the answers reach all processes.

Only the first process reports. If an event needs an answer (does the training continue? is a checkpoint wanted?), it
waits for the answer and shares it with the others, so that all of them do the same.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from manyhands.training.callbacks.callback import CallbackPlan
from manyhands.training.data.position import Position
from manyhands.training.learner import Learner, Say
from manyhands.training.running_sums import Figures, or_none
from manyhands.training.stopping import Ending

_SHOW_EVERY = 0.2  # seconds between two reports of progress

Event = dict[str, Any]


class Reporter:
    """Reports on one loop, and hands the callbacks' wish to stop to its ``ending``."""

    def __init__(self, learner: Learner, say: Say, plan: CallbackPlan, position: Position, ending: Ending) -> None:
        self._learner, self._say, self.plan = learner, say, plan
        self._position, self._ending = position, ending
        self._is_first = learner.rank == 0
        self._wanted: list[str] = []  # folders of the run that a checkpoint is wanted in
        self.states_before: Event | None = None  # the callbacks' states in the checkpoint that the job resumes
        self._rates: dict[int, dict[str, float]] = {}  # by step, of the metrics under way
        self._shown = time.perf_counter()

    # What everybody is shown

    def note(self, text: str) -> None:
        self._say({"kind": "note", "text": text})

    def warn(self, text: str) -> None:
        self._say({"kind": "warning", "text": text})

    def alive(self) -> None:
        """This process is at work: those that wait for it know then that it does not hang."""
        self._shown = time.perf_counter()
        self._say({"kind": "alive", "step": self._position.cursor.step})

    @property
    def is_due(self) -> bool:
        """Whether to report progress again."""
        return time.perf_counter() - self._shown >= _SHOW_EVERY

    def progress(self, figures: Figures | None) -> None:
        """How far the job is, with the sums of this process that have already arrived."""
        self._shown = time.perf_counter()
        event = {
            "kind": "progress",
            "batch": self._position.cursor.batch,
            "batches": self._position.batches,
            "samples": self._position.cursor.sample,
            "loss": figures.loss if figures and figures.count else None,
            "accuracy": or_none(figures.accuracy) if figures else None,
        }
        self._take_wish(self._say(self._with_place(event)))

    # Events for callbacks

    def begin(self, rows: list[dict[str, Any]], *, resumed: bool) -> None:
        """The job is restored and makes its first step next."""
        event = {"kind": "begin", "rows": rows, "resumed": resumed, "states": self.states_before}
        self._ask({**event, "batches": self._position.batches})

    def epoch_start(self) -> None:
        self._tell({"kind": "epoch_start"})

    def step(self) -> None:
        """After a step: start sending its sums if they are wanted, and report those that have arrived."""
        step = self._position.cursor.step
        if any(step % every == 0 for every in self.plan.every):
            self._rates[step] = self.rates()
            self._learner.send_figures(step)
        self.report_steps()

    def report_steps(self, *, wait: bool = False) -> None:
        """Hand on the sums of steps that are on the host; with ``wait`` all that are on their way."""
        if not self._rates:
            return
        for step, figures in self._learner.arrived_figures(wait=wait):
            self._tell({"kind": "steps", "sums": figures.as_json(), "rates": self._rates.pop(step, {})}, step=step)

    def rates(self) -> dict[str, float]:
        return self._learner.learning_rates() if self.plan.rates else {}

    def evaluation(self, metrics: dict[str, float], epoch: int) -> None:
        """The model was evaluated; ``metrics`` by name (val_loss, ...)."""
        self._ask({"kind": "evaluation", "figures": metrics}, epoch=epoch)

    def row(self, row: dict[str, Any], sums: Figures, *, ends_epoch: bool) -> None:
        """A row of metrics. One within an epoch needs no answer: its evaluation was reported already."""
        if ends_epoch:
            self._ask({"kind": "epoch", "row": row, "sums": sums.as_json()}, epoch=row["epoch"])
        else:
            self._tell({"kind": "row", "row": row, "sums": sums.as_json()})

    def checkpoint(self, path: Path) -> None:
        self._tell({"kind": "checkpoint", "path": str(path)})

    def states(self) -> Event | None:
        """The callbacks' states of this moment; for the first process."""
        return self._say(self._with_place({"kind": "states", "asks": True})) if self.plan.asks else None

    def take_wanted_folders(self) -> list[str]:
        """The folders that a checkpoint is wanted in."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def _ask(self, event: Event, **place: int) -> None:
        """Report, wait for the answer, and share it."""
        answer = None
        if self._is_first:
            answer = self._say({**self._with_place(event), **place, "asks": self.plan.asks})
        if self.plan.asks:
            shared = json.loads(self._learner.from_first(json.dumps(answer or {}).encode()))
            self._ending.take(shared)
            self._wanted += [folder for folder in shared.get("save", ()) if folder not in self._wanted]

    def _tell(self, event: Event, **place: int) -> None:
        """Report without waiting. The callbacks' own process has the answer already; a worker gets it later."""
        if self._is_first:
            self._take_wish(self._say({**self._with_place(event), **place}))

    def _take_wish(self, answer: Event | None) -> None:
        """An answer that was not asked for: a callback ends the training. The other processes do not know it yet."""
        self._ending.wish = self._ending.wish or answer

    def _with_place(self, event: Event) -> Event:
        cursor = self._position.cursor
        return {**event, "epoch": cursor.epoch + 1, "step": cursor.step}
