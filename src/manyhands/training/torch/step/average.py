"""An exponential moving average of a model's weights, kept on the device: ``mh.EMA``.

Every rank has the same weights after each step, and so the same average. It is held in float32 at least: a small part
of a bfloat16 weight would be rounded away. What reads the average (an evaluation) finds it in the model's own memory,
where a captured step will look for the weights again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from manyhands.training.torch.state import job_state


class Average:
    """The average of all floating-point parameters of a model."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._model, self._move = model, get_ema_multi_avg_fn(decay)
        self.restart()

    def restart(self) -> None:
        """Begin with the weights as they are."""
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.is_floating_point()]
        self.tensors = [_copy(parameter.detach(), like=parameter) for parameter in self._parameters]

    def settle(self) -> None:
        """Lie in memory as the weights do now: their dtype or memory format may have changed."""
        self.tensors = [_copy(one, like=weight) for one, weight in zip(self.tensors, self._parameters, strict=True)]

    @torch.no_grad()
    def update(self) -> None:
        """A step was made; nothing waits."""
        weights = [weight.detach().to(one.dtype) for one, weight in zip(self.tensors, self._parameters, strict=True)]
        if weights:
            self._move(self.tensors, weights, 0)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Within it the model's weights are the average."""
        kept = [weight.detach().clone() for weight in self._parameters]
        self.put_into_model()
        try:
            yield
        finally:
            self._write(kept)

    def put_into_model(self) -> None:
        self._write(self.tensors)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for weight, value in zip(self._parameters, values, strict=True):
            weight.copy_(value)

    def saved(self) -> bytes:
        """As weights of the model, with the rest of what it holds."""
        by_weight = {id(weight): one for weight, one in zip(self._parameters, self.tensors, strict=True)}
        names = self._model.named_parameters(remove_duplicate=False)
        averaged = {name: by_weight[id(weight)] for name, weight in names if id(weight) in by_weight}
        own = job_state.model_tensors(self._model)
        return job_state.pack({name: averaged.get(name, tensor) for name, tensor in own.items()})

    def restore(self, blobs: Mapping[str, bytes]) -> bool:
        """Continue from a checkpoint; False where it has no average: then this one begins with the weights."""
        self.restart()
        if "average" not in blobs:
            return False
        saved = job_state.unpack(blobs["average"])
        names = {id(weight): name for name, weight in self._model.named_parameters()}
        with torch.no_grad():
            for one, weight in zip(self.tensors, self._parameters, strict=True):
                one.copy_(saved[names[id(weight)]])
        return True


def _copy(tensor: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)
