"""What experiments need of PyTorch (:mod:`manyhands.lab.operations`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from manyhands.backends.torch.devices import matmul as matmul


def tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(values)


def numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


norm, relu, transpose = torch.linalg.vector_norm, torch.relu, torch.t


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def cut(joined: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    parts = joined.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def number(x: torch.Tensor, index: int) -> float:
    return x[0, index].item()


def with_number(x: torch.Tensor, index: int, value: float) -> torch.Tensor:
    x[0, index] = value
    return x


def pin(x: torch.Tensor) -> torch.Tensor | None:
    return x.pin_memory()
