"""The whole step in one CUDA graph: gather, forward, backward, update and metrics, with nothing left for the host.

A step of a small model is limited by the host, which issues hundreds of kernels one by one. A CUDA graph holds them all
and is launched at once. For that, everything a step reads must stay in its place: the data are on the device, the
epoch's order of samples too, and the position in it is a number on the device that the step itself moves on.

The first steps run without a graph, on the stream that the graph is captured on (they warm up kernels, optimizer state
and compiler); they are real steps of the training. A batch of another size (the last one of an epoch) runs eagerly.
"""

from __future__ import annotations

from typing import Any

import torch

from manyhands.training.torch.sources import Arrays
from manyhands.training.torch.step import EagerStep

_WARM_UP = 3


class GraphStep:
    """Runs the eager step's work on whole batches of one size, from data on the device."""

    def __init__(self, eager: EagerStep, data: Arrays, batch_size: int, *, compiled: bool, changing_rate: bool) -> None:
        self._eager, self._data, self._size = eager, data, batch_size
        self._order = torch.zeros(data.count, dtype=torch.int64, device=eager.device)
        self._position = torch.zeros((), dtype=torch.int64, device=eager.device)
        self._step = torch.zeros((), dtype=torch.int64, device=eager.device)
        self._window = torch.arange(batch_size, device=eager.device)
        self._stream = torch.cuda.Stream(eager.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._warm = 0
        self._objective: Any = torch.compile(eager.objective, dynamic=False) if compiled else eager.objective
        _make_capturable(eager.optimizer, eager.device, changing_rate=changing_rate)

    def begin_epoch(self, order: torch.Tensor, sample: int, step: int) -> None:
        """Take the order of an epoch, and where in it to begin."""
        self._order.copy_(order, non_blocking=True)
        self._position.fill_(sample)
        self._step.fill_(step)

    def __call__(self) -> None:
        """The next batch of the epoch."""
        if self._graph is not None:
            self._graph.replay()
            return
        current = torch.cuda.current_stream(self._eager.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if self._warm < _WARM_UP:
                self._work()
                self._warm += 1
            else:
                self._capture()
        current.wait_stream(self._stream)
        if self._graph is not None:
            self._graph.replay()

    def _capture(self) -> None:
        self._eager.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._work()
        self._graph = graph

    def _work(self) -> None:
        eager = self._eager
        batch = eager.numbers.lay(self._data.take(self._order.index_select(0, self._position + self._window)))
        eager.optimizer.zero_grad(set_to_none=True)
        with eager.numbers.scope(eager.device):
            loss, right = self._objective(eager.model, batch)
        loss.backward()
        if eager.clip:
            torch.nn.utils.clip_grad_norm_(eager.parameters, eager.clip, foreach=True)
        eager.optimizer.step()
        eager.metrics.add(loss, right, self._size, self._step)
        self._position += self._size
        self._step += 1


def _make_capturable(optimizer: torch.optim.Optimizer, device: torch.device, *, changing_rate: bool) -> None:
    """Make an optimizer fit for a graph: what changes from step to step is a tensor on the device."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if _is_sgd(optimizer):
            group["fused"], group["foreach"] = True, False
        if changing_rate and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], device=device)


def why_not(
    data: object, optimizer: torch.optim.Optimizer, device: torch.device, world: int, accumulate: int
) -> str | None:
    """The reason why a step cannot go into one graph; None if it may."""
    if device.type != "cuda":
        return "no CUDA graph on a CPU"
    if world > 1:
        return "several ranks: gradients cross processes during the step"
    if accumulate > 1:
        return "the batch is worked off in parts"
    if not isinstance(data, Arrays):
        return "the data are not arrays that can live on the GPU, but come from a loader"
    if data.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
        return "the data do not fit on the GPU"
    if not (optimizer.defaults.get("fused") or "capturable" in optimizer.defaults or _is_sgd(optimizer)):
        return f"{type(optimizer).__name__} reads its state on the host in every step (it is not capturable)"
    return None


def _is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is torch.optim.SGD
