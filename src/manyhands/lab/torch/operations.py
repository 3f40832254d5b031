"""What experiments need of PyTorch (:mod:`manyhands.lab.operations`)."""

from __future__ import annotations

from typing import Any

import torch

from manyhands.backends.torch.devices import matmul as matmul


def tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(values)


def numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def norm(x: torch.Tensor) -> Any:
    return torch.linalg.vector_norm(x)


def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)
