"""What happens in a training, from the loop to the callbacks, and their wishes back.

The loop may run in a worker process; callbacks run in the process that called ``fit``. Between them go *events*,
dictionaries with a ``kind``: the :class:`Reporter` of the loop sends them, the caller's :class:`Dispatcher` calls the
callbacks. An event that ``asks`` gets an answer: whether to stop and why, and into which folders to write a checkpoint;
or the callbacks' states. The reporter waits for it and shares it, so that all processes do the same. Any other event is
answered only if the training should stop, and the loop does not wait for that answer.

Only the first process reports.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from manyhands import files
from manyhands.errors import CallbackFailed, ManyhandsError
from manyhands.training.callbacks.callback import Callback, CallbackPlan, Training, plan_of, unique_names
from manyhands.training.callbacks.display import Picture, Progress
from manyhands.training.callbacks.loggers import Logger
from manyhands.training.data.order import Position
from manyhands.training.learner import Learner, Say, share
from manyhands.training.options import ENDLESS, Settings
from manyhands.training.result import Result
from manyhands.training.running_sums import Totals, add, means_by_name, or_none
from manyhands.training.stopping import Ending

_SHOW_EVERY = 0.2  # seconds between two reports of progress

Event = dict[str, Any]


class Reporter:
    """The loop's side: reports what happens, and hands the callbacks' wish to stop to the job's ``ending``."""

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

    def progress(self, totals: Totals | None) -> None:
        """How far the job is, with the sums of this process that have already arrived."""
        self._shown = time.perf_counter()
        event = {
            "kind": "progress",
            "batch": self._position.cursor.batch,
            "batches": self._position.batches,
            "samples": self._position.cursor.sample,
            "loss": totals.loss if totals and totals.count else None,
            "accuracy": or_none(totals.accuracy) if totals else None,
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
            self._learner.send_totals(step)
        self.report_steps()

    def report_steps(self, *, wait: bool = False) -> None:
        """Hand on the sums of steps that are on the host; with ``wait`` all that are on their way."""
        if not self._rates:
            return
        for step, totals in self._learner.arrived_totals(wait=wait):
            self._tell({"kind": "steps", "sums": totals.as_json(), "rates": self._rates.pop(step, {})}, step=step)

    def rates(self) -> dict[str, float]:
        return self._learner.learning_rates() if self.plan.rates else {}

    def evaluation(self, metrics: dict[str, float], epoch: int) -> None:
        """The model was evaluated; ``metrics`` by name (val_loss, ...)."""
        self._ask({"kind": "evaluation", "metrics": metrics}, epoch=epoch)

    def row(self, row: dict[str, Any], sums: Totals, *, ends_epoch: bool) -> None:
        """A row of metrics. One within an epoch needs no answer: its evaluation was reported already."""
        if ends_epoch:
            self._ask({"kind": "epoch", "row": row, "sums": sums.as_json()}, epoch=row["epoch"])
        else:
            self._tell({"kind": "row", "row": row, "sums": sums.as_json()})

    def model(self, model: Any) -> None:
        """The model between two epochs, which callbacks may change."""
        self._ask({"kind": "model", "model": model})

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
            answer = share(self._learner, answer or {})
            self._ending.take(answer)
            self._wanted += [folder for folder in answer.get("save", ()) if folder not in self._wanted]

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


class Dispatcher:
    """The caller's side: calls the callbacks of one training, in their order; a context manager."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        settings: Settings,
        run: Path | None,
        *,
        quiet: bool,
        first: bool,
        title: str = "",
    ) -> None:
        """It shows progress unless one of the callbacks does, or it is to be ``quiet``; it draws the curves of a run.

        ``first``: whether this is the job's first process; in others no callback is called.
        """
        # Of all: it is the same in every process, also in quiet ones.
        self.plan = plan_of(callbacks, has_run=run is not None)
        called = [callback for callback in callbacks if not (quiet and isinstance(callback, Progress))]
        if not quiet and not any(isinstance(callback, Progress) for callback in called):
            called.append(Progress())
        if run is not None:
            called.append(Picture(title))
        self.training = Training(settings.max_epochs if settings.max_epochs < ENDLESS else None, run)
        self.training.max_steps = settings.limits.max_steps
        self._callbacks = dict(zip(unique_names(called), called, strict=True)) if first else {}
        # Of callbacks that get means over steps: what makes an epoch's sums those since their last call.
        self._offsets = {name: Totals() for name, callback in self._callbacks.items() if callback.every}
        self._begun: list[str] = []
        self.notes: list[str] = []  # for the result; those known when the job begins are shown, too

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks that are called in this process."""
        return list(self._callbacks.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.training.error = error
        for name in self._begun:
            try:
                self._call(name, "on_fit_end", self.training)
            except Exception as another:
                if error is None:
                    raise
                error.add_note(f"And then: {another}")

    def end(self, result: Result) -> None:
        """Set the result of the training, for the callbacks' last call."""
        result.notes += self.notes
        self.training.result = result

    def event(self, event: Event) -> Event | None:
        """Call the callbacks of this event; returns the answer if the event asks for one."""
        if event["kind"] == "states":
            return self._states()
        if "epoch" in event and event["kind"] != "checkpoint":  # that of an epoch's end is written in the next one
            self.training.epoch, self.training.step = event["epoch"], event["step"]
            self.training.batches = event.get("batches", self.training.batches)
        if event["kind"] == "warning":
            warnings.warn(event["text"], stacklevel=2)
        elif (handle := getattr(self, f"_on_{event['kind']}", None)) is not None:
            handle(event)
        answer = {"stop": self.training.stopped, "by": self.training.stopped_by}
        if not event.get("asks"):
            return answer if self.training.stopped is not None else None
        wanted, self.training.wanted = self.training.wanted, []
        return {**answer, "save": wanted}

    # Events: one method for each kind; "alive" needs none

    def _on_begin(self, event: Event) -> None:
        training = self.training
        training.rows, training.resumed = list(event["rows"]), event["resumed"]
        if event["states"] is not None:
            self._restore(event["states"])
        for name in self._callbacks:
            self._begun.append(name)
            self._call(name, "on_fit_start", training)
        for text in self.notes:
            self._call_all("on_note", training, text, kinds=(Progress,))

    def _on_epoch_start(self, event: Event) -> None:
        self._call_all("on_epoch_start", self.training)

    def _on_progress(self, event: Event) -> None:
        metrics = {name: event[name] for name in ("batch", "samples", "loss", "accuracy") if event[name] is not None}
        self._call_all("on_progress", self.training, metrics)

    def _on_steps(self, event: Event) -> None:
        sums = Totals.from_json(event["sums"])
        for name, offset in self._offsets.items():
            if event["step"] % (self._callbacks[name].every or 1) == 0:
                means = means_by_name(add([sums, offset]), "train")
                self._offsets[name] = sums.negative()
                self._call(name, "on_steps", self.training, {**means, **event["rates"]})

    def _on_evaluation(self, event: Event) -> None:
        self._call_all("on_evaluation", self.training, event["metrics"])

    def _on_epoch(self, event: Event) -> None:
        self._add_row(event)
        self._call_all("on_epoch_end", self.training, event["row"])

    def _on_model(self, event: Event) -> None:
        self._call_all("on_model", self.training, event["model"])

    def _on_row(self, event: Event) -> None:
        self._add_row(event)
        self._call_all("on_row", self.training, event["row"], kinds=(Progress, Logger))

    def _add_row(self, event: Event) -> None:
        sums = Totals.from_json(event["sums"])
        self._offsets = {name: add([offset, sums]) for name, offset in self._offsets.items()}
        self.training.rows.append(event["row"])

    def _on_checkpoint(self, event: Event) -> None:
        self._call_all("on_checkpoint", self.training, Path(event["path"]))

    def _on_note(self, event: Event) -> None:
        self._call_all("on_note", self.training, event["text"], kinds=(Progress,))

    # State

    def _states(self) -> Event:
        states = {}
        for name in self._callbacks:
            state = self._call(name, "state_dict")
            files.exact_json(state, f"{name}.state_dict()")
            states[name] = state
        return {"states": states, "offsets": {name: sums.as_json() for name, sums in self._offsets.items()}}

    def _restore(self, saved: Event) -> None:
        for name in self._callbacks:
            if name in saved["states"]:
                self._call(name, "load_state_dict", saved["states"][name])
            if name in self._offsets and name in saved.get("offsets", {}):
                self._offsets[name] = Totals.from_json(saved["offsets"][name])
        if unused := [name for name, state in saved["states"].items() if state and name not in self._callbacks]:
            self.notes.append(f"the checkpoint has the state of {', '.join(unused)}, which this job does not have")

    # Calls

    def _call_all(self, moment: str, *args: Any, kinds: tuple[type[Callback], ...] = (Callback,)) -> None:
        for name, callback in self._callbacks.items():
            if isinstance(callback, kinds):
                self._call(name, moment, *args)

    def _call(self, name: str, moment: str, *args: Any) -> Any:
        """Call one; an error names the callback and the event. manyhands' own errors need no such wrapper."""
        try:
            return getattr(self._callbacks[name], moment)(*args)
        except ManyhandsError:
            raise
        except Exception as error:
            where = f"{moment} (epoch {self.training.epoch}, step {self.training.step})"
            raise CallbackFailed(f"the callback {name} failed in {where}: {type(error).__name__}: {error}") from error
