"""The loop's side of callbacks: what happens is reported as events, and the answers reach all processes.

Only the first process reports. If an event needs an answer (does the training continue? is a checkpoint wanted?), it
waits for the answer and shares it with the others, so that all of them do the same.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from manyhands.training.callbacks.callback import CallbackPlan
from manyhands.training.running_sums import Figures

if TYPE_CHECKING:
    from manyhands.training.loop import Loop

Event = dict[str, Any]


class Reporter:
    """Reports on one loop."""

    def __init__(self, loop: Loop, plan: CallbackPlan) -> None:
        self._loop, self.plan = loop, plan
        self.stop: str | None = None  # why the training is to end
        self.stopped_by = ""  # what wants it to: "early stopping", "stopped by callback"
        self.wanted: list[str] = []  # folders of the run that a checkpoint is wanted in
        self.states_before: Event | None = None  # the callbacks' states in the checkpoint that the job resumes
        self.resumed = False
        self._rates: dict[int, dict[str, float]] = {}  # by step, of the figures under way

    def begin(self) -> None:
        """The job is restored and makes its first step next."""
        event = {"kind": "begin", "rows": self._loop.result.rows, "resumed": self.resumed, "states": self.states_before}
        self._ask({**event, "batches": self._loop.batches_of_epoch()})

    def epoch_start(self) -> None:
        self._say({"kind": "epoch_start"})

    def step(self) -> None:
        """After a step: start sending its figures if they are wanted, and report those that have arrived."""
        if not self.plan.every:
            return
        step = self._loop.cursor.step
        if any(step % every == 0 for every in self.plan.every):
            self._rates[step] = self.rates()
            self._loop.learner.send_figures(step)
        self.report_steps()

    def report_steps(self, *, wait: bool = False) -> None:
        """Hand on the figures of steps that are on the host; with ``wait`` all that are on their way."""
        if not self._rates:
            return
        for step, figures in self._loop.learner.arrived_figures(wait=wait):
            rates = self._rates.pop(step, {})
            self._say({"kind": "steps", "sums": figures.as_json(), "rates": rates}, step=step)

    def rates(self) -> dict[str, float]:
        return self._loop.learner.learning_rates() if self.plan.rates else {}

    def evaluated(self, figures: dict[str, float], epoch: int) -> None:
        """The model was evaluated; ``figures`` by name (val_loss, ...)."""
        self._ask({"kind": "evaluation", "figures": figures}, epoch=epoch)

    def epoch_end(self, row: dict[str, Any], sums: Figures) -> None:
        """``row`` is the epoch's; its cursor stands at the next one already."""
        self._ask({"kind": "epoch", "row": row, "sums": sums.as_json()}, epoch=row["epoch"])

    def row(self, row: dict[str, Any], sums: Figures) -> None:
        """A row within an epoch; its evaluation was reported already."""
        self._say({"kind": "row", "row": row, "sums": sums.as_json()})

    def checkpoint(self, path: Any) -> None:
        self._say({"kind": "checkpoint", "path": str(path)})

    def states(self) -> Event | None:
        """The callbacks' states of this moment; for the first process."""
        if not self.plan.asks:
            return None
        states: Event | None = self._loop.say(self._place({"kind": "states", "asks": True}))
        return states

    def take_wanted_folders(self) -> list[str]:
        """The folders that a checkpoint is wanted in."""
        wanted, self.wanted = self.wanted, []
        return wanted

    def _ask(self, event: Event, **place: int) -> None:
        answer = None
        if self._loop.first:
            answer = self._loop.say({**self._place(event), **place, "asks": self.plan.asks})
        if self.plan.asks:
            shared = json.loads(self._loop.learner.from_first(json.dumps(answer or {}).encode()))
            self.take_stop(shared)
            self.wanted += [folder for folder in shared.get("save", ()) if folder not in self.wanted]

    def take_stop(self, answer: Event) -> None:
        """Take the callbacks' answer, the same in every process: whether to end the training, and why."""
        if self.stop is None and answer.get("stop") is not None:
            self.stop, self.stopped_by = answer["stop"], answer["by"]

    def _say(self, event: Event, **place: int) -> None:
        """Report without waiting. The callbacks' own process has the answer already; a worker gets it later."""
        if self._loop.first:
            self.heard(self._loop.say({**self._place(event), **place}))

    def heard(self, answer: Event | None) -> None:
        """An answer that was not asked for: a callback ends the training."""
        self._loop.ending.wish = self._loop.ending.wish or answer

    def _place(self, event: Event) -> Event:
        cursor = self._loop.cursor
        return {**event, "epoch": cursor.epoch + 1, "step": cursor.step}
