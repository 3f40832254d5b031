"""The caller's side of callbacks: events of the first process become calls of callbacks, and their wishes the answer.

An event is a dictionary with a ``kind``. An event that ``asks`` gets an answer: whether to stop and why, and into which
folders to write a checkpoint; or the callbacks' states. Any other event is answered only if the training should stop,
and the loop does not wait for that answer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from manyhands import files
from manyhands.errors import CallbackFailed, ManyhandsError
from manyhands.training.callbacks.callback import Callback, CallbackPlan, Training, plan_of, unique_names
from manyhands.training.callbacks.curves import Picture
from manyhands.training.callbacks.logger import Logger
from manyhands.training.callbacks.progress import Progress
from manyhands.training.options import ENDLESS, Settings
from manyhands.training.result import Result
from manyhands.training.running_sums import Figures, added_up, means_by_name

Event = dict[str, Any]


def dispatcher_for(
    callbacks: Sequence[Callback],
    settings: Settings,
    run: Path | None,
    *,
    quiet: bool,
    first: bool,
    title: str = "",
) -> Dispatcher:
    """The dispatcher of a training; it shows its progress unless one of the callbacks does, or it is to be quiet.

    In a run's folder it draws the curves, with this title.
    """
    plan = plan_of(callbacks, has_run=run is not None)  # of all: it is the same in every process, also in quiet ones
    called = [callback for callback in callbacks if not (quiet and isinstance(callback, Progress))]
    if not quiet and not any(isinstance(callback, Progress) for callback in called):
        called.append(Progress())
    if run is not None:
        called.append(Picture(title))
    training = Training(settings.max_epochs if settings.max_epochs < ENDLESS else None, run)
    training.max_steps = settings.limits.max_steps
    return Dispatcher(called, plan, training, first=first)


class Dispatcher:
    """Calls the callbacks of one training, in their order; a context manager."""

    def __init__(self, callbacks: Sequence[Callback], plan: CallbackPlan, training: Training, *, first: bool) -> None:
        """``first``: whether this is the job's first process; in others no callback is called."""
        self.plan, self.training = plan, training
        self._callbacks = dict(zip(unique_names(callbacks), callbacks, strict=True)) if first else {}
        self._means = {name: StepMeans() for name, callback in self._callbacks.items() if callback.every}
        self._begun: list[str] = []
        self.notes: list[str] = []  # for the result
        self._notes: list[str] = []  # that came before the start

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
        self._place(event)
        if event["states"] is not None:
            self._restore(event["states"])
        for name in self._callbacks:
            self._begun.append(name)
            self._call(name, "on_fit_start", training)
        for text in tuple(self._notes):  # without callbacks each is kept again
            self._on_note({"text": text})

    def _on_epoch_start(self, event: Event) -> None:
        self._place(event)
        self._call_all("on_epoch_start", self.training)

    def _on_progress(self, event: Event) -> None:
        self._place(event)
        figures = {name: event[name] for name in ("batch", "samples", "loss", "accuracy") if event[name] is not None}
        self._call_all("on_progress", self.training, figures)

    def _on_steps(self, event: Event) -> None:
        self._place(event)
        sums = Figures.from_json(event["sums"])
        for name, means in self._means.items():
            if event["step"] % (self._callbacks[name].every or 1) == 0:
                self._call(name, "on_steps", self.training, {**means.take(sums), **event["rates"]})

    def _on_evaluation(self, event: Event) -> None:
        self._place(event)
        self._call_all("on_evaluation", self.training, event["figures"])

    def _on_epoch(self, event: Event) -> None:
        self._add_row(event)
        self._call_all("on_epoch_end", self.training, event["row"])

    def _on_row(self, event: Event) -> None:
        self._add_row(event)
        for name, callback in self._callbacks.items():
            if isinstance(callback, Progress | Logger):
                self._call(name, "on_row", self.training, event["row"])

    def _add_row(self, event: Event) -> None:
        self._place(event)
        for means in self._means.values():
            means.end_epoch(Figures.from_json(event["sums"]))
        self.training.rows.append(event["row"])

    def _on_checkpoint(self, event: Event) -> None:
        self._call_all("on_checkpoint", self.training, Path(event["path"]))

    def _on_note(self, event: Event) -> None:
        if not self._begun:
            self._notes.append(event["text"])
            return
        for name, callback in self._callbacks.items():
            if isinstance(callback, Progress):
                self._call(name, "on_note", self.training, event["text"])

    def _place(self, event: Event) -> None:
        self.training.epoch, self.training.step = event["epoch"], event["step"]
        self.training.batches = event.get("batches", self.training.batches)

    # State

    def _states(self) -> Event:
        states = {}
        for name in self._callbacks:
            state = self._call(name, "state_dict")
            files.exact_json(state, f"{name}.state_dict()")
            states[name] = state
        return {"states": states, "means": {name: means.state() for name, means in self._means.items()}}

    def _restore(self, saved: Event) -> None:
        for name in self._callbacks:
            if name in saved["states"]:
                self._call(name, "load_state_dict", saved["states"][name])
            if name in self._means and name in saved["means"]:
                self._means[name].restore(saved["means"][name])
        if unused := [name for name, state in saved["states"].items() if state and name not in self._callbacks]:
            self.notes.append(f"the checkpoint has the state of {', '.join(unused)}, which this job does not have")

    # Calls

    def _call_all(self, moment: str, *args: Any) -> None:
        for name in self._callbacks:
            self._call(name, moment, *args)

    def _call(self, name: str, moment: str, *args: Any) -> Any:
        """Call one; an error names the callback and the event. manyhands' own errors need no such wrapper."""
        try:
            return getattr(self._callbacks[name], moment)(*args)
        except ManyhandsError:
            raise
        except Exception as error:
            step = self.training.step
            raise CallbackFailed(
                f"the callback {name} failed in {moment} (epoch {self.training.epoch}, step {step}): "
                f"{type(error).__name__}: {error}"
            ) from error


class StepMeans:
    """The sums that one callback has not received yet."""

    def __init__(self) -> None:
        self._carried = Figures()  # of the epochs before
        self._reported = Figures()  # of this epoch's sums

    def take(self, sums: Figures) -> dict[str, float]:
        """The means up to these sums of the epoch."""
        rest = self._rest(sums)
        self._carried, self._reported = Figures(), sums
        return means_by_name(rest, "train")

    def end_epoch(self, sums: Figures) -> None:
        self._carried, self._reported = self._rest(sums), Figures()

    def _rest(self, sums: Figures) -> Figures:
        loss = self._carried.loss_sum + sums.loss_sum - self._reported.loss_sum
        return Figures(
            loss if math.isfinite(loss) else math.nan,
            self._carried.correct + sums.correct - self._reported.correct,
            self._carried.count + sums.count - self._reported.count,
            counted=sums.counted or self._carried.counted,
            logged=added_up([(self._carried.logged, 1), (sums.logged, 1), (self._reported.logged, -1)]),
        )

    def state(self) -> list[Any]:
        return [sums.as_json() for sums in (self._carried, self._reported)]

    def restore(self, state: list[Any]) -> None:
        self._carried, self._reported = (Figures.from_json(sums) for sums in state)
