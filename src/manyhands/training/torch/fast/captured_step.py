"""The whole step in one CUDA graph: gather, forward, backward, update and metrics, with nothing left for the host.

The host limits the step of a small model, because it issues hundreds of kernels one by one. A CUDA graph holds them all
and is launched at once. :class:`GraphStep` wraps a plain step: it calls the same parts at the same moments, on batches
that come from a :class:`~.batches.ResidentBatches`.

There is a graph for each batch size: the usual one, and the short last batch of an epoch. The first steps of a size
are real training steps without a graph, on the capture stream; they warm up kernels, optimizer state and compiler.
All of them are checked for Python state that a graph would freeze (:mod:`.python_state`), and the last of them for
host waits, which cannot be captured. It is better to find these before the capture: one that fails midway leaks in
PyTorch (2.11 loses memory and can draw no more random numbers). If a warm-up step fails before its update, or if the
capture fails, nothing has changed yet and a plain step runs instead.

Extensions (:mod:`.extension`) act on the passes. One that searches wants two steps as written first, neither compiled
nor on lanes, and looks at the second. With side lanes, three kinds of work run in parallel with the main chain of
kernels: casts of weights during the gather of the batch (:mod:`.batched_casts`), weight gradients during the backward
pass (:mod:`.lanes`), and metrics during everything after the forward pass (:mod:`.batches`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.backends.torch.run.graph_nodes import instantiate
from manyhands.backends.torch.run.own_streams import reserve_workspaces
from manyhands.backends.torch.run.streams import capturing
from manyhands.training.torch.fast import python_state
from manyhands.training.torch.fast.batches import (
    CountCorrect,
    ResidentBatches,
    already_counted,
    forward,
    forward_counting_later,
)
from manyhands.training.torch.fast.capture_stream import on, rehearsal, stream_of
from manyhands.training.torch.fast.extension import Extension, SizedStep
from manyhands.training.torch.fast.lanes.lanes import StepLanes
from manyhands.training.torch.step.part import Turn, enter_all
from manyhands.training.torch.step.plain import PlainStep

_WARM_UP = 3
_AS_WRITTEN = 2  # steps before the warm-up, if something is searched for (in the last of these steps)
_LONGEST_REASON = 300  # characters
_FEATURES = ("norms", "lanes", "compiler")  # what a failure may turn off, in this order


@dataclass
class _PassResults:
    """The results of a step's passes that its metrics need."""

    loss: torch.Tensor
    count_correct: CountCorrect
    after_forward: Any = None  # a mark on the main lane, if metrics may run in parallel with the backward pass


class _FailedBeforeUpdate(Exception):
    """A step failed before it changed anything."""


class GraphStep:
    """Makes a plain step's updates on data that are on the device, batch by batch in the epoch's order."""

    def __init__(
        self,
        step: PlainStep,
        batches: ResidentBatches,
        batch_size: int,
        extensions: Sequence[Extension],
        *,
        lanes: StepLanes | None = None,
        compiled: bool = False,
        reasons: Mapping[str, str] | None = None,
    ) -> None:
        """``reasons``: why one of the ``_FEATURES`` is not used although it was wanted."""
        self._step, self._batches, self._batch_size = step, batches, batch_size
        self._extensions, self._lanes, self.compiled = list(extensions), lanes, compiled
        self._stream = stream_of(step.device)
        self.reasons = {feature: reason[:_LONGEST_REASON] for feature, reason in (reasons or {}).items()}
        self._sized: dict[int, SizedStep] = {}
        # Why there will be no more graphs, from this step on.
        self.ended: str | None = python_state.hooks(step.model, step.optimizer)
        self._watch = python_state.Watch([step.model, getattr(step.objective, "loss", None)], step.optimizer)

    def begin_epoch(self, order: torch.Tensor, sample: int, step: int) -> None:
        """Take the order of an epoch, and where in it to begin."""
        self._batches.begin(order, sample, step)

    def __call__(self, size: int) -> bool:
        """Make the step of the epoch's next batch; False where it and all later steps have to be plain.

        ``ended`` then says why.
        """
        if self.ended is not None:
            return False
        if size not in self._sized:
            self._sized[size] = self._new(size)
        sized = self._sized[size]
        if sized.replay is None:
            try:
                with on(self._stream, self._step.device):
                    if sized.warm < _WARM_UP:
                        self._warm_up(sized)
                    else:  # the capture computes nothing yet
                        sized.replay = self._capture(sized).replay
                why = None
            except _FailedBeforeUpdate as failure:
                why = f"{type(failure.__cause__).__name__}: {failure.__cause__}"
            if why is not None:  # outside of the except block, where the error no longer holds the memory of its step
                if self._turn_feature_off(sized, why):
                    return self(size)
                self.ended = f"the graph could not be made ({why})"[:_LONGEST_REASON]
                return False
        if sized.replay is not None:
            sized.replay()
        return True

    def _turn_feature_off(self, sized: SizedStep, why: str) -> bool:
        """Turn off a feature that may have caused the failure; returns False if none is left.

        In a step as written: the search. Later: our own kernels with all modes, the lanes, the compiler.
        """
        if sized.warm < 0:
            self._extensions = [each for each in self._extensions if not each.searches]
            del self._sized[sized.size]  # only this size: others may have their graphs
            return True
        blamed = [] if sized.compiled else [each.without for each in self._extensions if each.without]
        if blamed:
            self._extensions = [each for each in self._extensions if not each.is_mode]
            self._note_reason("norms", f"{blamed[0]} ({why})")
        elif self._lanes is not None:
            self._lanes = None
            self._note_reason("lanes", f"no side lanes ({why})")
        elif sized.compiled:
            self._compile_nothing(why)
        else:
            return False
        self._sized.clear()
        return True

    def _compile_nothing(self, why: str) -> None:
        self.compiled = False
        self._note_reason("compiler", f"kernels are not compiled ({why})")

    def _note_reason(self, feature: str, reason: str) -> None:
        self.reasons[feature] = reason[:_LONGEST_REASON]

    def _new(self, size: int) -> SizedStep:
        """Only the usual size is worth the half minute that compiling takes."""
        run: Callable[..., Any] = functools.partial(forward_counting_later, self._step, self._batches)
        is_compiled = self.compiled and size == self._batch_size
        if is_compiled:
            try:
                run = self._compiled_forward()
            except Exception as error:  # there may be no compiler for this version of Python
                is_compiled = False
                self._compile_nothing(f"{type(error).__name__}: {error}")
        warm = -_AS_WRITTEN if any(each.searches for each in self._extensions) else 0
        return SizedStep(torch.arange(size, device=self._step.device), run, is_compiled, self._lanes, warm)

    def _compiled_forward(self) -> Callable[..., tuple[torch.Tensor, CountCorrect]]:
        """The forward pass; it is compiled when it is called for the first time."""
        options: dict[str, Any] = {}
        if self._lanes is not None:
            options["post_grad_custom_post_pass"] = self._lanes.inductor_pass()
        compiled = torch.compile(self._forward, dynamic=False, options=options)

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, CountCorrect]:
            loss, correct = compiled(*inputs)  # the compiled function also counts correct predictions
            return loss, already_counted(correct)

        return run

    def _forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return forward(self._step, self._batches, *inputs)

    def notes(self) -> list[str]:
        """For the job's result: which features are not used and why."""
        return [self.reasons[feature] for feature in _FEATURES if feature in self.reasons]

    def explain(self) -> str:
        """The step of each batch size: its graph, its kernels, its lanes."""
        lines = []
        for size, sized in self._sized.items():
            graph = "in one CUDA graph" if sized.replay is not None else "not captured yet"
            lines.append(f"a batch of {size}: {graph}, kernels {'compiled' if sized.compiled else 'not compiled'}")
            features = ["compiler", "norms"] if size == self._batch_size else ["norms"]
            reasons = [self.reasons[feature] for feature in features if feature in self.reasons]
            lines += [f"  {note}" for note in (*sized.notes, *reasons)]
            if self._lanes is not None:
                lines += self._lanes.explain(size)
            else:
                lines.append(f"  {self.reasons.get('lanes', 'all on one lane')}")
        return "\n".join(lines)

    def _warm_up(self, sized: SizedStep) -> None:
        step = self._step
        statistics = [buffer.clone() for buffer in step.model.buffers()]
        before = step.versions()
        self._watch.before()
        reserve_workspaces([self._stream], step.device)
        try:
            with nullcontext() if self._lanes is None else self._lanes.on_one_stream():
                self._work(sized)
        except Exception as error:
            if step.versions() != before:
                raise  # the update has begun, and cannot be repeated
            with torch.no_grad():
                for buffer, before_step in zip(step.model.buffers(), statistics, strict=True):
                    buffer.copy_(before_step)
            raise _FailedBeforeUpdate from error
        sized.warm += 1
        reasons = (self._watch.after(), *(part.why_not_captured() for part in step.parts))
        self.ended = next((reason for reason in reasons if reason is not None), None)

    def _capture(self, sized: SizedStep) -> torch.cuda.CUDAGraph:
        self._step.optimizer.zero_grad(set_to_none=True)
        reserve_workspaces([self._stream], self._step.device)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            with capturing(graph, self._step.device, stream=self._stream):
                self._work(sized)
            instantiate(graph, self._step.device)
        except Exception as error:
            raise _FailedBeforeUpdate from error
        return graph

    def _work(self, sized: SizedStep) -> None:
        """Run the whole step."""
        step, batches = self._step, self._batches
        turn = Turn(batches.step, sized.size)
        step.begin(turn)
        # Only up to the update: a step that fails after it cannot be repeated.
        with rehearsal() if sized.warm == _WARM_UP - 1 else nullcontext():
            results = self._as_written(sized) if sized.warm < 0 else self._passes(sized)
            turn.marks.append(results.loss.detach())
            step.after_backward(turn)
        step.update(turn)
        # Metrics are some 15 small kernels that only need the forward pass, so they run in parallel with the rest.
        # They are issued last, so that a step that fails before its update has changed nothing.
        lanes = None if results.after_forward is None else self._lanes
        with nullcontext() if lanes is None else lanes.on_metrics_lane(results.after_forward):
            step.metrics.add(results.loss, results.count_correct(), sized.size, turn.step)
        batches.advance(sized.size)

    def _passes(self, sized: SizedStep) -> _PassResults:
        """Forward and backward."""
        step, lanes = self._step, self._lanes
        acting = [each for each in self._extensions if not (sized.compiled and each.is_mode)]
        for each in acting:
            each.begin(sized)
        with enter_all([each.forward(sized) for each in acting]):
            loss, count_correct = sized.forward(*self._batches.inputs(sized.window))
        # No mark with a loss scale: then the update writes to the metrics, too.
        mark = None if lanes is None or any(part.scales_loss for part in step.parts) else lanes.mark()
        side_lanes = nullcontext() if lanes is None else lanes.during_backward(sized.size, compiled=sized.compiled)
        with side_lanes, enter_all([each.backward(sized) for each in acting]):
            step.scaled(loss).backward()
        for each in acting:
            each.after_backward(sized, loss)
        sized.notes = [note for each in acting if (note := each.explain(sized)) is not None]
        if mark is not None:
            sized.notes.append("metrics: on a lane of their own, in parallel with the backward pass and the update")
        return _PassResults(loss, count_correct, mark)

    def _as_written(self, sized: SizedStep) -> _PassResults:
        """Forward and backward without dispatch modes, but for the one that searches in the last such step."""
        searching = [each for each in self._extensions if each.searches and sized.warm == -1]
        with enter_all([each.search(sized) for each in searching]):
            loss, correct = self._forward(*self._batches.inputs(sized.window))
            for each in searching:
                each.after_forward(loss)
            self._step.scaled(loss).backward()
        sized.notes = [note for each in searching if (note := each.explain(sized)) is not None]
        return _PassResults(loss, already_counted(correct))
