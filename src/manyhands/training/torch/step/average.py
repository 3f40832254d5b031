"""An exponential moving average of a model's weights, kept on the device: ``mh.EMA``.

Every rank has the same weights after each step, and so the same average. It is held in float32 at least: a small part
of a bfloat16 weight would be rounded away. What reads the average (an evaluation) finds it in the model's own memory,
where a captured step will look for the weights again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from manyhands.training.callbacks.callback import Averaging
from manyhands.training.learner import NO_AVERAGE
from manyhands.training.torch.state import job_state
from manyhands.training.torch.step.part import Part, Turn


class Average(Part):
    """The average of all floating-point parameters of a model, and on request of its buffers."""

    def __init__(self, model: torch.nn.Module, averaging: Averaging) -> None:
        self._model, self._averaging = model, averaging
        self._move = get_ema_multi_avg_fn(averaging.decay)
        self._restart()

    def _restart(self) -> None:
        """Begin with the weights as they are."""
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.is_floating_point()]
        self._buffers = _moving_buffers(self._model) if self._averaging.buffers else []
        self._averages = [_copy(value.detach(), like=value) for value in self._values()]

    def prepare(self) -> None:
        """Take the dtype and memory format that the weights have now: they may have changed."""
        pairs = zip(self._averages, self._values(), strict=True)
        self._averages = [_copy(average, like=value) for average, value in pairs]

    def _values(self) -> list[torch.Tensor]:
        """The averaged tensors. Buffers are looked up: a layer may put another tensor there in each step."""
        return [*self._parameters, *map(self._model.get_buffer, self._buffers)]

    def tensors(self) -> Sequence[torch.Tensor]:
        return self._averages

    @property
    def of_buffers(self) -> list[torch.Tensor]:
        """The averages of the buffers."""
        return self._averages[len(self._parameters) :]

    @torch.no_grad()
    def after_update(self, turn: Turn) -> None:
        pairs = zip(self._averages, self._values(), strict=True)
        values = [value.detach().to(average.dtype) for average, value in pairs]
        if values:
            self._move(self._averages, values, 0)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Within it the model's weights are the average."""
        weights = [value.detach().clone() for value in self._values()]
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(weights)

    def close(self) -> None:
        """The model has the average afterwards."""
        self._write(self._averages)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for current, value in zip(self._values(), values, strict=True):
            current.copy_(value)

    def state_to_save(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The average as weights of the model, with its other tensors."""
        by_value = {id(value): average for value, average in zip(self._values(), self._averages, strict=True)}
        names = itertools.chain(
            self._model.named_parameters(remove_duplicate=False), self._model.named_buffers(remove_duplicate=False)
        )
        averaged = {name: by_value[id(value)] for name, value in names if id(value) in by_value}
        tensors = job_state.model_tensors(self._model)
        return {}, {"average": job_state.pack({name: averaged.get(name, tensor) for name, tensor in tensors.items()})}

    def restore(self, state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> str | None:
        """Without an average in the checkpoint this one begins with its weights."""
        self._restart()
        if "average" not in blobs:
            return NO_AVERAGE
        saved = job_state.unpack(blobs["average"])
        by_id = {id(weight): name for name, weight in self._model.named_parameters()}
        names = [*(by_id[id(weight)] for weight in self._parameters), *self._buffers]
        with torch.no_grad():
            for average, name in zip(self._averages, names, strict=True):
                average.copy_(saved[name])
        return None


def _moving_buffers(model: torch.nn.Module) -> list[str]:
    """The names of buffers that can be averaged: numbers that are saved, finite, and each in a place of its own."""
    saved = model.state_dict()
    return [
        name
        for name, buffer in model.named_buffers()
        if name in saved
        and buffer.is_floating_point()
        and bool(torch.isfinite(buffer).all())  # a mask of -inf would become NaN
        and (0 not in buffer.stride() or buffer.numel() < 2)  # an expanded one cannot be written to
    ]


def _copy(tensor: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)
