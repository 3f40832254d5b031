"""A step that is replayed from CUDA graphs, with little left for the host to do.

The host limits the step of a small model, because it issues hundreds of kernels one by one. A CUDA graph holds them all
and is launched at once. :class:`CapturedStep` wraps a plain step: it calls the same methods at the same moments, on
batches from :mod:`.inputs`, and records what they issue. On one rank, with one micro-batch, all is one graph. With
several ranks, or with gradient accumulation, a step consists of segments::

    begin              gradients to zero, ...                     a graph
    passes             forward and backward of a micro-batch      a graph, replayed for each micro-batch
    sums of gradients  ordinary calls, beside the backward pass   the graph of the passes signals when each may start
    update             clip, update, average, ...                 a graph

There is a graph of the passes for each kind of micro-batch that comes back: the usual one, the short last one of an
epoch, those of other lengths. The first steps of a kind are real training steps without a graph; they warm up kernels,
optimizer state and compiler. All of them are checked for Python state that a graph would freeze (:mod:`.python_state`),
and the passes of the last one for host waits, which cannot be recorded. It is better to find these before: a capture
that fails midway leaks in PyTorch (2.11 loses memory and can draw no more random numbers). If a step fails before its
update, or if it cannot be recorded, everything is as before, and a plain step runs instead.

Extensions (:mod:`.extension`) act on the passes. One that searches wants two steps as written first, neither compiled
nor on lanes, and looks at the second. With side lanes, weight gradients run in parallel with the backward pass.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.errors import CannotCompile
from manyhands.training.data.order import Window
from manyhands.training.torch.data.batches import Batch, Shard
from manyhands.training.torch.fast import python_state
from manyhands.training.torch.fast.extension import Extension, Passes
from manyhands.training.torch.fast.inputs import DeviceCounter, MicroBatch, StepInputs
from manyhands.training.torch.fast.lanes.eager import StepLanes
from manyhands.training.torch.fast.python_state import unread
from manyhands.training.torch.fast.recorder import CudaRecorder, NotRecorded, Replay, error_in_words
from manyhands.training.torch.ranks.gradient_sum import GradientSum
from manyhands.training.torch.state import randomness
from manyhands.training.torch.step.part import LossOf, TrainingStep, Turn, enter_all
from manyhands.training.torch.step.update import StepSnapshot

WARM_UP = 3
_AS_WRITTEN = 2  # steps before the warm-up, if something is searched for (in the last of these steps)
MOST_GRAPHS = 16  # of passes
_MOST_KINDS = 1024  # of micro-batches that are remembered, to see whether they come back
_MANY = 0.1  # of all steps: so many plain ones are worth a note
_MULTIPLES = (8, 16, 32, 64, 128)  # to which lengths may be padded
_LONGEST_REASON = 300  # characters

_Part = tuple[MicroBatch, Passes]


@dataclass
class _Segment:
    """Work that runs as such in the first steps, and is then recorded and replayed."""

    runs: int = 0
    replay: Replay | None = None


class CapturedStep:
    """Makes a plain step's updates by replaying graphs."""

    def __init__(
        self,
        step: TrainingStep,
        inputs: StepInputs,
        recorder: CudaRecorder,
        usual_size: int,
        extensions: Sequence[Extension] = (),
        *,
        lanes: StepLanes | None = None,
        compiled: bool = False,
        reasons: Sequence[str] = (),
    ) -> None:
        """``usual_size``: of a micro-batch; only such are worth the time that compiling takes.

        ``reasons``: why kernels, lanes or the compiler are not used although they were wanted.
        """
        self._step, self.inputs, self._recorder, self._usual_size = step, inputs, recorder, usual_size
        self._extensions, self._lanes, self.compiled = list(extensions), lanes, compiled
        self.reasons = [reason[:_LONGEST_REASON] for reason in reasons]
        self._passes: dict[Hashable, Passes] = {}
        self._kinds: dict[Hashable, tuple[torch.Size, ...]] = {}  # in the order in which they came; with their shapes
        self._refused: set[Hashable] = set()  # kinds that cannot be recorded, while others can
        self._begin = _Segment()
        self._updates: dict[frozenset[int], _Segment] = {}
        # Without sums, all is one graph.
        self._sums = step.gradients if isinstance(step.gradients, GradientSum) else None
        self._several_ranks = self._sums is not None and not self._sums.alone
        if self._sums is not None:
            self._sums.start_later(recorder.signal)
        self._number = DeviceCounter(step.device)  # of the step
        self._why_frozen: str | None = None  # where the step reads the number of its batch
        self._tried: Passes | None = None  # the newest that were made without their graph
        self._is_summing = False  # whether sums over the ranks have begun: then the step cannot be made again
        self.steps = Counter[str]()
        # Why there will be no more graphs, from this step on.
        self.ended: str | None = python_state.hooks(step.model, step.optimizer)
        roots = [step.model, getattr(step.objective, "loss", None)]
        self._watch = python_state.Watch(roots, step.metrics, step.optimizer)

    def __call__(self, window: Window, shard: Shard | None, batch_idx: int = 0) -> bool:
        """Make the step of a batch; False where it has to be made plainly (``ended``: all later ones, too)."""
        if self.ended is not None:
            return False
        try:
            parts = self.inputs.parts(window, shard)
        except CannotCompile as error:
            self.ended = str(error)
            return False
        each_with_passes: list[_Part] = []
        for part in parts:
            kind = (part.kind, part.size, window.size, self._several_ranks and part is parts[-1])
            passes = self._passes_of(kind, part)
            if passes is None:
                self.steps["plain"] += 1
                return False
            each_with_passes.append((part, passes))
        if self._make(window, each_with_passes, batch_idx):
            return True
        return self.ended is None and self(window, shard, batch_idx)

    def _passes_of(self, kind: Hashable, part: MicroBatch) -> Passes | None:
        """The passes over micro-batches of this kind.

        None if there are graphs of too many kinds already, or if this kind comes for the first time: many do not come
        back. The first of all is worth a graph at once.
        """
        if kind not in self._passes:
            is_new = bool(self._kinds) and kind not in self._kinds
            self._kinds[kind] = part.shapes
            graphs = sum(each.replay is not None for each in self._passes.values())
            if is_new or kind in self._refused or graphs >= MOST_GRAPHS:
                while len(self._kinds) > _MOST_KINDS:
                    del self._kinds[next(iter(self._kinds))]
                return None
            self._passes[kind] = self._new_passes(kind, part.size)
        return self._passes[kind]

    def _new_passes(self, kind: Hashable, size: int) -> Passes:
        loss_of: LossOf = self._step.loss_of
        if is_compiled := self.compiled and size == self._usual_size:
            try:
                loss_of = self._compile()
            except Exception as error:  # there may be no compiler for this version of Python
                is_compiled = False
                self._compile_nothing(f"{type(error).__name__}: {error}")
        warm = -_AS_WRITTEN if any(each.searches for each in self._extensions) else 0
        return Passes(kind, size, loss_of, is_compiled, self._lanes, warm)

    def _compile(self) -> LossOf:
        """The forward pass; it is compiled when it is called for the first time."""
        options: dict[str, Any] = (
            {} if self._lanes is None else {"post_grad_custom_post_pass": self._lanes.inductor_pass()}
        )
        compiled: LossOf = torch.compile(self._step.loss_of, dynamic=False, options=options)
        return compiled

    # Steps

    def _make(self, window: Window, parts: Sequence[_Part], batch_idx: int) -> bool:
        """Make the step of these micro-batches; False if it failed before its update, and everything is as before."""
        turn = Turn(self._number.tensor, window.size)
        self._number.go_to(window.step, 1)
        if self._is_recorded(parts):
            self._run(turn, parts)
            self.steps["replayed"] += 1
            return True
        self.steps["warm-up"] += 1
        why = self._make_carefully(turn, parts, batch_idx)
        if why is None:
            return True
        self._number.forget()
        self.inputs.forget_place()
        if self._why_frozen is not None or not self._turn_feature_off(why):
            self.ended = self._why_frozen or f"the graph could not be made ({why})"[:_LONGEST_REASON]
        return False

    def _is_recorded(self, parts: Sequence[_Part]) -> bool:
        segments = () if self._sums is None else (self._begin, *(self._updates.values() or (_Segment(),)))
        return all(passes.replay for _, passes in parts) and all(segment.replay for segment in segments)

    def _make_carefully(self, turn: Turn, parts: Sequence[_Part], batch_idx: int) -> str | None:
        """Make a step of which something is not recorded yet; returns why it failed before its update, if it did."""
        self._step.objective.batch_idx = unread(batch_idx, self._note_read)
        with randomness.untouched:  # by a loader's thread
            before, kinds = StepSnapshot(self._step), tuple(passes.kind for _, passes in parts)
            self._watch.before()
            try:
                with self._recorder.run_stream():
                    self._run(turn, parts)
            except Exception as error:
                if self._is_summing or (not isinstance(error, NotRecorded) and before.has_updated):
                    raise  # the update has begun, and cannot be repeated
                before.put_back()
                return error_in_words(error)
            changed = self._watch.after(kinds)
        parts_say = (part.why_not_captured() for part in self._step.parts)
        reasons = (self.ended, self._why_frozen, changed, *parts_say)
        self.ended = next((reason for reason in reasons if reason is not None), None)
        return None

    def _note_read(self, line: str) -> None:
        why = f"training_step reads batch_idx ({line}), which changes in every step: leave it out, or count in a buffer"
        self._why_frozen = self._why_frozen or why

    def _run(self, turn: Turn, parts: Sequence[_Part]) -> None:
        """Make the step: by replays where there are graphs, else by the work itself."""
        step, sums = self._step, self._sums
        self._is_summing = False
        if sums is None:
            ((part, passes),) = parts
            self._run_passes(part, passes, functools.partial(self._whole_step, turn, part, passes))
            return
        if self._begin.replay is not None:
            sums.reset()
        self._run_segment(self._begin, functools.partial(step.begin, turn))
        for part, passes in parts:
            last = part is parts[-1][0]
            self._run_passes(part, passes, functools.partial(self._pass, turn, part, passes, last=last))
        self._is_summing = True  # and with it the other ranks
        step.sum_up(turn)
        update = self._updates.setdefault(sums.unused(), _Segment())
        self._run_segment(update, functools.partial(self._update, turn))

    def _run_segment(self, segment: _Segment, work: Callable[[], object]) -> None:
        if segment.runs < WARM_UP:
            segment.runs += 1
            work()
            return
        if segment.replay is None:
            try:
                segment.replay = self._recorder.record(work)
            except NotRecorded as error:  # passes have been made already: only this segment is made as such
                self.ended = f"the graph could not be made ({error_in_words(error)})"[:_LONGEST_REASON]
                work()
                return
        segment.replay()

    def _run_passes(self, part: MicroBatch, passes: Passes, work: Callable[[], object]) -> None:
        if passes.warm < WARM_UP:
            self._tried = passes
            part.load(recorded=False)
            with nullcontext() if self._lanes is None else self._lanes.on_one_stream():
                work()
            passes.warm += 1
            return
        part.load(recorded=True)
        if passes.replay is None:
            self._tried = passes
            self._record(passes, work)
        if self._sums is not None and passes.arrivals is not None:
            self._sums.repeat(passes.arrivals)
        if passes.replay is not None:
            passes.replay()

    def _record(self, passes: Passes, work: Callable[[], object]) -> None:
        def record() -> None:
            passes.replay = self._recorder.record(work)

        if self._sums is None:
            self._step.optimizer.zero_grad(set_to_none=True)
            record()
        else:
            passes.arrivals = self._sums.arrivals(record)

    # Work that is recorded

    def _whole_step(self, turn: Turn, part: MicroBatch, passes: Passes) -> None:
        self._step.begin(turn)
        self._pass(turn, part, passes, last=True)
        self._step.sum_up(turn)
        self._update(turn)

    def _update(self, turn: Turn) -> None:
        self._step.update(turn)
        self._number.tensor += 1

    def _pass(self, turn: Turn, part: MicroBatch, passes: Passes, *, last: bool) -> None:
        """Forward and backward of a micro-batch."""
        # Only here: an update that fails cannot be repeated.
        with self._recorder.rehearsal() if passes.warm == WARM_UP - 1 else nullcontext():
            batch = part.batch(recorded=passes.warm == WARM_UP)
            (self._pass_as_written if passes.warm < 0 else self._extended_pass)(turn, batch, passes, last=last)
        part.finish()

    def _extended_pass(self, turn: Turn, batch: Batch, passes: Passes, *, last: bool) -> None:
        acting = [each for each in self._extensions if not (passes.compiled and each.is_mode)]
        for each in acting:
            each.begin(passes)

        def loss_of(batch: Batch, size: int) -> Any:
            with enter_all([each.forward(passes) for each in acting]):
                return passes.loss_of(batch, size)

        lanes = [] if self._lanes is None else [self._lanes.during_backward(passes.kind, compiled=passes.compiled)]
        around = enter_all([*lanes, *(each.backward(passes) for each in acting)])
        loss = self._step.passes(turn, batch, passes.size, last=last, loss_of=loss_of, around_backward=around)
        for each in acting:
            each.after_backward(passes, loss)
        passes.notes = [note for each in acting if (note := each.explain(passes)) is not None]

    def _pass_as_written(self, turn: Turn, batch: Batch, passes: Passes, *, last: bool) -> None:
        """Without dispatch modes, but for the one that searches in the last such pass."""
        searching = [each for each in self._extensions if each.searches and passes.warm == -1]

        def loss_of(batch: Batch, size: int) -> Any:
            loss, *others = self._step.loss_of(batch, size)
            for each in searching:
                each.after_forward(loss)
            return loss, *others

        with enter_all([each.search(passes) for each in searching]):
            self._step.passes(turn, batch, passes.size, last=last, loss_of=loss_of)
        passes.notes = [note for each in searching if (note := each.explain(passes)) is not None]

    # What may be turned off

    def _turn_feature_off(self, why: str) -> bool:
        """Turn off a feature that may have caused the failure; returns False if none is left.

        First plain values in a batch are no longer watched. Where other kinds of micro-batches have their graphs, this
        kind is plain. In a step as written it is the search. Later: our own kernels with all modes, the lanes, the
        compiler.
        """
        if self.inputs.read_values():
            return True
        tried = self._tried
        if tried is None:
            return False
        if self.is_recorded:
            self._refused.add(tried.kind)
            del self._passes[tried.kind]
            return True
        if tried.warm < 0:
            self._extensions = [each for each in self._extensions if not each.searches]
            del self._passes[tried.kind]  # only this kind: others may have their graphs
            return True
        modes = [] if tried.compiled else [each for each in self._extensions if each.is_mode]
        if modes:
            self._extensions = [each for each in self._extensions if not each.is_mode]
            for without in (each.without for each in modes if each.without):
                self._note_reason(f"{without} ({why})")
        elif self._lanes is not None:
            self._lanes = None
            self._note_reason(f"no side lanes ({why})")
        elif tried.compiled:
            self._compile_nothing(why)
        else:
            return False
        self._passes.clear()
        return True

    def _compile_nothing(self, why: str) -> None:
        self.compiled = False
        self._note_reason(f"kernels are not compiled ({why})")

    def _note_reason(self, reason: str) -> None:
        self.reasons.append(reason[:_LONGEST_REASON])

    def close(self) -> None:
        """From now on steps are plain."""
        if self._sums is not None:
            self._sums.start_later(None)

    # For people

    @property
    def is_recorded(self) -> bool:
        """Whether there is a graph of some passes."""
        return any(passes.replay is not None for passes in self._passes.values())

    def notes(self) -> list[str]:
        """For the job's result: which features are not used and why, and which steps were plain."""
        notes = [*self.reasons]
        plain, every = self.steps["plain"], sum(self.steps.values())
        if plain > every * _MANY and len(self._kinds) > MOST_GRAPHS:
            padded = {multiple: _padded_length(self._kinds, multiple) for multiple in _MULTIPLES}
            best = next((multiple for multiple, count in padded.items() if count <= MOST_GRAPHS), None)
            cure = "" if best is None else f": padded to multiples of {best} they would be of {padded[best]}"
            kinds = f"their batches are of {len(self._kinds)} kinds of shapes, and {MOST_GRAPHS} at most get a graph"
            if (line := self.inputs.read_at) is not None:
                kinds, cure = f"training_step reads a plain value of a batch ({line})", ": make it a tensor"
            notes.append(f"{plain} of {every} steps were plain, because {kinds}{cure}")
        return notes

    def explain(self) -> str:
        """The passes over each kind of micro-batch: their graph, their kernels, their lanes."""
        lines = [", ".join(f"{count} steps: {kind}" for kind, count in self.steps.items()), *self.reasons]
        for passes in self._passes.values():
            graph = "in a CUDA graph" if passes.replay is not None else "not captured yet"
            lines.append(f"{passes.size} samples: {graph}, kernels {'compiled' if passes.compiled else 'not compiled'}")
            lines += [f"  {note}" for note in passes.notes]
            lines += ["  all on one lane"] if self._lanes is None else self._lanes.explain(passes.kind)
        return "\n".join(lines)


def _padded_length(kinds: Mapping[Hashable, Sequence[torch.Size]], multiple: int) -> int:
    """How many kinds of shapes there would be, if all lengths but those of the batch were multiples of this number."""
    return len(
        {tuple(tuple(-(-length // multiple) for length in shape[1:]) for shape in shapes) for shapes in kinds.values()}
    )
