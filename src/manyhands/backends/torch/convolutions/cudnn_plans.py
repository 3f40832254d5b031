"""cuDNN's plans for a convolution, through ``nvidia-cudnn-frontend``, if that is installed.

A plan is an engine of cuDNN with its settings ("knobs"). Plans are excluded if they compile a kernel first, if their
results depend on the order in which blocks finish, or if they need a large workspace.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import threading
from collections.abc import Iterator
from typing import Any

import torch

from manyhands.backends.torch.convolutions.problems import Form, Kind, Problem
from manyhands.backends.torch.run.graphs.workspaces import LARGEST, has_arenas, workspace

PACKAGE = "nvidia-cudnn-frontend"
_MOST_WORKSPACE = 64 << 20  # bytes
_handles: dict[torch.device, Any] = {}
_lock = threading.Lock()  # a handle belongs to one stream at a time


@functools.cache
def missing() -> str | None:
    """Why cuDNN's plans are not available; None if they are."""
    if not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        return "there is no cuDNN"
    try:
        library = _library()
        if library.backend_version() != torch.backends.cudnn.version():
            return f"{PACKAGE} finds another cuDNN than PyTorch's"
    except Exception as error:  # not installed, or it finds no cuDNN
        return f"{PACKAGE} cannot be used ({type(error).__name__}: {error})"[:200]
    return None


def version() -> str:
    """The versions that plans depend on; known without importing anything."""
    try:
        installed = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        installed = "is not installed"
    return f"cuDNN {torch.backends.cudnn.version()}, {PACKAGE} {installed}"


@functools.cache
def _library() -> Any:
    return importlib.import_module("cudnn")


class CudnnPlan:
    """A way to solve a problem: one plan."""

    name = "cudnn"

    def __init__(self, graph: _Graph, index: int, result: Form) -> None:
        self._graph, self._index, self._result = graph, index, result
        graph.description.build_plan_at_index(index)
        self._workspace = int(graph.description.get_workspace_size_plan_at_index(index))
        if self._workspace > _MOST_WORKSPACE:
            raise ValueError("it needs too much memory")
        # Observed with cuDNN 9.19: it clears only its small workspaces.
        self.is_cleared_ahead = 0 < self._workspace <= LARGEST and has_arenas()

    def data(self) -> list[object]:
        """What is stored of this way."""
        engine, knobs = self._graph.description.get_engine_and_knobs_at_index(self._index)
        return [self.name, int(engine), sorted([int(knob), int(value)] for knob, value in (knobs or {}).items())]

    def __call__(self, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        form, device = self._result, first.device
        result = torch.empty_strided(form.shape, form.stride, dtype=first.dtype, device=device)
        self._graph.execute(self._index, (first, second, result), workspace(self._workspace, device))
        return result if bias is None else result.add_(bias.view(1, -1, 1, 1))


def candidates(problem: Problem, result: Form, most: int) -> Iterator[CudnnPlan]:
    """The plans that cuDNN's heuristics rank first."""
    if missing() is not None:
        return
    library = _library()
    graph = _Graph(problem, result)
    graph.description.create_execution_plans([library.heur_mode.A, library.heur_mode.B])
    graph.description.deselect_behavior_notes([library.behavior_note.RUNTIME_COMPILATION])
    graph.description.deselect_numeric_notes([library.numerical_note.NONDETERMINISTIC])
    graph.description.deselect_workspace_greater_than(_MOST_WORKSPACE)
    for index in range(min(graph.description.get_execution_plan_count(), most)):
        try:
            yield CudnnPlan(graph, index, result)
        except Exception:  # this cuDNN cannot build the plan, or it is excluded
            continue


def remembered(problem: Problem, result: Form, data: list[Any]) -> CudnnPlan:
    """The plan of :meth:`CudnnPlan.data`; raises if it can no longer be built."""
    _, engine, knobs = data
    library = _library()
    graph = _Graph(problem, result)
    graph.description.create_execution_plan(engine, {library.knob_type(knob): value for knob, value in knobs})
    return CudnnPlan(graph, 0, result)


class _Graph:
    """cuDNN's graph of one operation."""

    def __init__(self, problem: Problem, result: Form) -> None:
        library = _library()
        numbers = {
            torch.bfloat16: library.data_type.BFLOAT16,
            torch.float16: library.data_type.HALF,
        }[problem.dtype]
        wide = library.data_type.FLOAT
        self.description: Any = library.pygraph(
            io_data_type=numbers,
            intermediate_data_type=wide,
            compute_data_type=wide,
            handle=_handle(problem.device),
        )
        first, second = (self._tensor(form, numbers) for form in (problem.first, problem.second))
        how: Any = {name: list(getattr(problem, name)) for name in ("padding", "stride", "dilation")}
        if problem.kind is Kind.FORWARD:
            out = self.description.conv_fprop(image=first, weight=second, **how)
        elif problem.kind is Kind.INPUT_GRADIENT:
            out = self.description.conv_dgrad(loss=first, filter=second, **how)
        else:
            out = self.description.conv_wgrad(image=second, loss=first, **how)
        out.set_output(True).set_data_type(numbers).set_dim(list(result.shape)).set_stride(list(result.stride))
        self._tensors = first, second, out
        self.description.validate()
        self.description.build_operation_graph()

    def _tensor(self, form: Form, numbers: Any) -> Any:
        return self.description.tensor(dim=list(form.shape), stride=list(form.stride), data_type=numbers)

    def execute(self, index: int, tensors: tuple[torch.Tensor, ...], memory: torch.Tensor) -> None:
        """Launch a plan on the current stream."""
        pack = dict(zip(self._tensors, tensors, strict=True))
        with _lock:
            self.description.execute_plan_at_index(pack, memory, index, handle=_handle(tensors[0].device))


def close() -> None:
    """Release cuDNN's handles: it warns about those that are left when the process ends."""
    with _lock:
        while _handles:
            _library().destroy_handle(_handles.popitem()[1])


def _handle(device: torch.device) -> Any:
    """cuDNN's handle for a device, set to the current stream."""
    if device not in _handles:
        with torch.cuda.device(device):
            _handles[device] = _library().create_handle()
    _library().set_stream(handle=_handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return _handles[device]
