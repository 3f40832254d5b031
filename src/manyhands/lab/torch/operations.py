"""What experiments need of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from manyhands.backends.torch.devices import matmul as matmul


def tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(values)


def numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


norm, relu, transpose = torch.linalg.vector_norm, torch.relu, torch.t


def with_number(x: torch.Tensor, index: int, value: float) -> torch.Tensor:
    x[0, index] = value
    return x


# A copy in page-locked memory of the host; None if the framework has no such memory.
def pin(x: torch.Tensor) -> torch.Tensor | None:
    return x.pin_memory()
