"""Evaluation and prediction by replaying CUDA graphs: the forward pass of each kind of batch that comes back."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from manyhands.training.torch.data.batches import Batch, map_tensors
from manyhands.training.torch.fast import python_state
from manyhands.training.torch.fast.inputs import LoadedPart, LoaderInputs
from manyhands.training.torch.fast.recorder import CudaRecorder, Replay
from manyhands.training.torch.state import randomness
from manyhands.training.torch.step.running_sums import RunningSums

Forward = Callable[[Batch, int], Any]  # of a batch and its samples

_WARM_UP = 2
_MOST_GRAPHS = 16


@dataclass
class _ForwardGraph:
    runs: int = 0  # of the function, as such
    replay: Replay | None = None
    results: Any = None  # which each replay writes to


class CapturedForward:
    """A function that computes with batches and changes nothing on the host.

    It is called as such until a kind of batch has come back twice, and for good if it cannot be captured.
    """

    def __init__(self, function: Forward, recorder: CudaRecorder, model: torch.nn.Module, sums: RunningSums) -> None:
        self._function, self._recorder = function, recorder
        self._inputs = LoaderInputs()
        self._graphs: dict[Hashable, _ForwardGraph] = {}
        self._watch = python_state.Watch([model], sums)
        self._is_captured = True

    def __call__(self, batch: Batch, size: int) -> Any:
        if self._is_captured:
            try:
                part = LoadedPart(self._inputs, batch, size)
                graph = self._graphs.setdefault((part.kind, size), _ForwardGraph())
                if graph.replay is not None or len(self._graphs) <= _MOST_GRAPHS:
                    return self._replay(part, graph)
            except Exception:  # the function itself says what is wrong, if it is not the capture
                self._is_captured = False
        return self._function(batch, size)

    def _replay(self, part: LoadedPart, graph: _ForwardGraph) -> Any:
        if graph.runs < _WARM_UP:
            graph.runs += 1
            return self._run_watched(part, is_last=graph.runs == _WARM_UP)
        part.load(recorded=True)
        if graph.replay is None:

            def work() -> None:
                graph.results = self._function(part.batch(recorded=True), part.size)

            with self._recorder.run_stream():
                graph.replay = self._recorder.record(work)
        graph.replay()
        return map_tensors(torch.clone, graph.results)

    def _run_watched(self, part: LoadedPart, *, is_last: bool) -> Any:
        """Call the function, and see whether a graph would compute the same."""
        with randomness.untouched:
            self._watch.before()
            with self._recorder.run_stream(), self._recorder.rehearsal() if is_last else nullcontext():
                results = self._function(part.batch(recorded=False), part.size)
            self._is_captured = self._watch.after(part.kind) is None
        return results
