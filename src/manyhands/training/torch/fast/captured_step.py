"""The whole step in one CUDA graph: gather, forward, backward, update and metrics, with nothing left for the host.

The host limits the step of a small model, because it issues hundreds of kernels one by one. A CUDA graph holds them all
and is launched at once. For that, all memory that a step reads must stay at the same address: the data and the epoch's
order of samples are on the device, and so is the position in that order, which the step itself advances.

There is a graph for each batch size: the usual one, and the short last batch of an epoch. The first steps of a size
are real training steps without a graph, on the capture stream; they warm up kernels, optimizer state and compiler.
All of them are checked for Python state that a graph would freeze (:mod:`.python_state`), and the last of them for
host waits, which cannot be captured. It is better to find these before the capture: one that fails midway leaks in
PyTorch (2.11 loses memory and can draw no more random numbers). If a warm-up step fails before its update, or if the
capture fails, nothing has changed yet and a plain step runs instead.

Two steps as written, neither compiled nor on lanes, may come first. The second searches for redundant biases, which
are left out from then on (:mod:`.redundant_biases`).

With side lanes, three kinds of work run in parallel with the main chain of kernels: casts of weights during the gather
of the batch (:mod:`.batched_casts`), weight gradients during the backward pass (:mod:`.lanes`), and metrics during
everything after the forward pass (:mod:`.forward`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from manyhands.backends.torch.run.own_streams import reserve_workspaces
from manyhands.backends.torch.run.streams import capturing
from manyhands.errors import CannotCompile
from manyhands.training.torch.data.sources import Arrays
from manyhands.training.torch.fast import python_state
from manyhands.training.torch.fast.batched_casts import BatchedCasts
from manyhands.training.torch.fast.capturable import is_compiled, make_capturable
from manyhands.training.torch.fast.capture_stream import on, rehearsal, stream_of
from manyhands.training.torch.fast.forward import CountCorrect, already_counted, forward, forward_counting_later
from manyhands.training.torch.fast.lanes.lanes import StepLanes
from manyhands.training.torch.fast.norms.batch_norm import FusedBatchNorms, is_clean
from manyhands.training.torch.fast.norms.choice import fused_norms
from manyhands.training.torch.fast.norms.group_norm import FusedGroupNorms
from manyhands.training.torch.fast.position import Position
from manyhands.training.torch.fast.redundant_biases import RedundantBiases, Search, may_have_redundant_biases
from manyhands.training.torch.step.activation_checkpoints import ActivationCheckpoints
from manyhands.training.torch.step.eager import EagerStep

_WARM_UP = 3
_AS_WRITTEN = 2  # steps before the warm-up, if something is searched for (in the last of these steps)
_LONGEST_REASON = 300  # characters
# Takes an epoch's order, and positions in it.
_Forward = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, CountCorrect]]


@dataclass
class _SizedStep:
    """The step for one batch size, and its graph."""

    window: torch.Tensor
    forward: _Forward
    warm: int = 0  # warm-up steps so far; negative: this many steps as written are still to run
    redundant: RedundantBiases | None = None
    replay: Callable[[], object] | None = None  # replays the graph
    notes: list[str] = field(default_factory=list)  # what our kernels replace and what runs on side lanes, in words


@dataclass
class _PassResults:
    """The results of a step's passes that its metrics need."""

    loss: torch.Tensor
    count_correct: CountCorrect
    after_forward: Any = None  # a mark on the main lane, if metrics may run in parallel with the backward pass


class _FailedBeforeUpdate(Exception):
    """A step failed before it changed anything."""


class GraphStep:
    """Does the eager step's work on data that are on the device, batch by batch in the epoch's order."""

    def __init__(
        self,
        eager: EagerStep,
        data: Arrays,
        batch_size: int,
        *,
        compiled: bool,
        changing_rate: bool,
        side_lanes: bool = False,
        fused_norms: bool = False,
        checkpointed: ActivationCheckpoints | None = None,
    ) -> None:
        self._eager, self._data, self._size = eager, data, batch_size
        self.compiled = compiled
        self._position = Position(data.count, eager.device)
        self._stream = stream_of(eager.device)
        trained = [parameter for parameter in eager.parameters if parameter.requires_grad]
        # Side lanes may hold as much memory as two copies of the gradients; DistributedDataParallel's buckets take one.
        held = 2 * sum(parameter.numel() * parameter.element_size() for parameter in trained)
        self._lanes = StepLanes.on_streams(eager.device, self._stream, max_held=held) if side_lanes else None
        # By feature ("norms", "lanes", "compiler"): why it is not used although it was wanted.
        self.reasons: dict[str, str] = {}
        self._norms = self._fused_norms() if fused_norms else None
        # A compiler compiles nothing that is called inside a dispatch mode, not even at later calls.
        self._casts = BatchedCasts() if not is_compiled(eager.model) and checkpointed is None else None
        self._searching = checkpointed is None and may_have_redundant_biases(eager.model, eager.optimizer)
        self._checkpointed = checkpointed
        self._sized: dict[int, _SizedStep] = {}
        # Why there will be no more graphs, from this step on.
        self.ended: str | None = python_state.hooks(eager.model, eager.optimizer)
        self._watch = python_state.Watch([eager.model, getattr(eager.objective, "loss", None)], eager.optimizer)
        make_capturable(eager.optimizer, eager.device, changing_rate=changing_rate)

    def begin_epoch(self, order: torch.Tensor, sample: int, step: int) -> None:
        """Take the order of an epoch, and where in it to begin."""
        self._position.begin(order, sample, step)

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
                with on(self._stream, self._eager.device):
                    if sized.warm < _WARM_UP:
                        self._warm_up(sized)
                    else:  # the capture computes nothing yet
                        sized.replay = self._captured(sized).replay
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

    def _turn_feature_off(self, sized: _SizedStep, why: str) -> bool:
        """Turn off a feature that may have caused the failure; returns False if none is left.

        In a step as written: the search for redundant biases. Later: our own kernels, the lanes, the compiler.
        """
        size = len(sized.window)
        if sized.warm < 0:
            self._searching = False
            del self._sized[size]  # only this size: others may have their graphs
            return True
        if self._norms is not None and not self._is_compiled(size):  # a compiled step uses no dispatch modes
            self._norms = self._casts = None  # casts are a mode, too, around the forward pass only
            self._note_reason("norms", f"normalisation not fused ({why})")
        elif self._lanes is not None:
            self._lanes = None
            self._note_reason("lanes", f"no side lanes ({why})")
        elif self._is_compiled(size):
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

    def _new(self, size: int) -> _SizedStep:
        warm = -_AS_WRITTEN if self._searching else 0
        return _SizedStep(torch.arange(size, device=self._eager.device), self._forward_of(size), warm)

    def _forward_of(self, size: int) -> _Forward:
        """The forward pass of a batch size; it is compiled when it is called for the first time."""
        if self._is_compiled(size):
            try:
                return self._compiled_forward()
            except Exception as error:  # there may be no compiler for this version of Python
                self._compile_nothing(f"{type(error).__name__}: {error}")
        return functools.partial(forward_counting_later, self._eager, self._data)

    def _compiled_forward(self) -> _Forward:
        options: dict[str, Any] = {}
        if self._lanes is not None:
            options["post_grad_custom_post_pass"] = self._lanes.inductor_pass()
        compiled = torch.compile(self._forward, dynamic=False, options=options)

        def forward(order: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, CountCorrect]:
            loss, correct = compiled(order, places)  # the compiled function also counts correct predictions
            return loss, already_counted(correct)

        return forward

    def _fused_norms(self) -> FusedBatchNorms | FusedGroupNorms | None:
        try:
            return fused_norms(self._eager)
        except CannotCompile as error:
            self._note_reason("norms", f"normalisation not fused ({error})")
            return None

    def _is_compiled(self, size: int) -> bool:
        """Whether this size is compiled: only the usual size is worth the half minute that compiling takes."""
        return self.compiled and size == self._size

    def notes(self) -> list[str]:
        """For the job's result: which features are not used and why."""
        return [self.reasons[feature] for feature in ("norms", "lanes", "compiler") if feature in self.reasons]

    def explain(self) -> str:
        """The step of each batch size: its graph, its kernels, its lanes."""
        lines = []
        for size, sized in self._sized.items():
            graph = "in one CUDA graph" if sized.replay is not None else "not captured yet"
            kernels = "compiled" if self._is_compiled(size) else "not compiled"
            lines.append(f"a batch of {size}: {graph}, kernels {kernels}")
            features = ["compiler", "norms"] if size == self._size else ["norms"]
            reasons = [self.reasons[feature] for feature in features if feature in self.reasons]
            redundant = [] if sized.redundant is None else [sized.redundant.explain()]
            lines += [f"  {note}" for note in (*redundant, *sized.notes, *reasons)]
            if self._lanes is not None:
                lines += self._lanes.explain(size)
            else:
                lines.append(f"  {self.reasons.get('lanes', 'all on one lane')}")
        return "\n".join(lines)

    def _warm_up(self, sized: _SizedStep) -> None:
        eager = self._eager
        statistics = [buffer.clone() for buffer in eager.model.buffers()]
        before = eager.versions()
        self._watch.before()
        reserve_workspaces([self._stream], eager.device)
        try:
            with nullcontext() if self._lanes is None else self._lanes.on_one_stream():
                self._work(sized)
        except Exception as error:
            if eager.versions() != before:
                raise  # the update has begun, and cannot be repeated
            with torch.no_grad():
                for buffer, before_step in zip(eager.model.buffers(), statistics, strict=True):
                    buffer.copy_(before_step)
            raise _FailedBeforeUpdate from error
        sized.warm += 1
        self.ended = self._watch.after()
        if self._checkpointed is not None and self._checkpointed.drew:
            self.ended = self.ended or "checkpointed blocks draw random numbers, whose state a graph cannot restore"

    def _captured(self, sized: _SizedStep) -> torch.cuda.CUDAGraph:
        self._eager.optimizer.zero_grad(set_to_none=True)
        reserve_workspaces([self._stream], self._eager.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._eager.device, stream=self._stream):
                self._work(sized)
        except Exception as error:
            raise _FailedBeforeUpdate from error
        return graph

    def _work(self, sized: _SizedStep) -> None:
        """Run the whole step."""
        eager, size = self._eager, len(sized.window)
        if eager.undo is not None:
            eager.undo.keep(eager.average)
        eager.optimizer.zero_grad(set_to_none=True)
        # Only up to the update: a step that fails after it cannot be repeated.
        with rehearsal() if sized.warm == _WARM_UP - 1 else nullcontext():
            results = self._as_written(sized) if sized.warm < 0 else self._passes(sized)
            eager.prepare_gradients()
        eager.update([results.loss.detach()], self._position.step)
        # Metrics are some 15 small kernels that only need the forward pass, so they run in parallel with the rest.
        # They are issued last, so that a step that fails before its update has changed nothing.
        lanes = None if results.after_forward is None else self._lanes
        with nullcontext() if lanes is None else lanes.on_metrics_lane(results.after_forward):
            eager.metrics.add(results.loss, results.count_correct(), size, self._position.step)
        self._position.advance(size)

    def _passes(self, sized: _SizedStep) -> _PassResults:
        """Forward and backward."""
        size, lanes = len(sized.window), self._lanes
        compiled = self._is_compiled(size)
        norms, casts = (None, None) if compiled else (self._norms, self._casts)
        if casts is not None:
            casts.forked = None if lanes is None else lanes.forked
        if norms is not None:
            norms.begin(poison=sized.warm == 0)
        with sized.redundant.left_out() if sized.redundant is not None else nullcontext():
            with casts or nullcontext(), norms or nullcontext():
                loss, count_correct = sized.forward(*self._places(sized))
            # No mark with a loss scale: then the update writes to the metrics, too.
            mark = None if lanes is None or self._eager.scale is not None else lanes.mark()
            side_lanes = nullcontext() if lanes is None else lanes.during_backward(size, compiled=compiled)
            with side_lanes, norms or nullcontext():
                self._eager.scaled(loss).backward()
        if sized.redundant is not None:
            sized.redundant.settle()
        sized.notes = [mode.explain() for mode in (casts, norms) if mode is not None and mode.counts]
        if mark is not None:
            sized.notes.append("metrics: on a lane of their own, in parallel with the backward pass and the update")
        if norms is not None and sized.warm == 0:
            self._check_for_poison(loss)
        return _PassResults(loss, count_correct, mark)

    def _check_for_poison(self, loss: torch.Tensor) -> None:
        gradients = [parameter.grad for parameter in self._eager.parameters if parameter.grad is not None]
        if not is_clean([loss.detach(), *gradients, *self._eager.model.buffers()]):
            why = "the model's own, or something reads memory past PyTorch"
            raise RuntimeError(f"a loss, gradient or buffer is NaN: {why}")

    def _as_written(self, sized: _SizedStep) -> _PassResults:
        """Forward and backward without dispatch modes, but for the one that searches in the last such step."""
        search = Search(self._eager.model) if sized.warm == -1 and self._searching else None
        with search or nullcontext():
            loss, correct = self._forward(*self._places(sized))
            if search is not None:
                search.trace(loss)
            self._eager.scaled(loss).backward()
        if search is not None:
            sized.redundant = search.redundant_biases()
        return _PassResults(loss, already_counted(correct))

    def _places(self, sized: _SizedStep) -> tuple[torch.Tensor, torch.Tensor]:
        return self._position.order, self._position.sample + sized.window

    def _forward(self, order: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return forward(self._eager, self._data, order, places)
