"""What tests of training on a GPU share: data, a net, notes of a job, how far weights are apart."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")


def samples(count: int, size: int, classes: int) -> tuple[Any, Any]:
    """Square grey images, and their labels."""
    images = torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(0))
    return images, torch.randint(classes, (count,), generator=torch.Generator().manual_seed(1))


def net() -> Any:
    """For images of 12 by 12, of five classes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(800, 5)
    )


def captured(result: Any) -> bool:
    return any("one CUDA graph" in note for note in result.notes)


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest distance of a tensor, relative to its size."""
    pairs = [(one[name].double(), other[name].double()) for name in other]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in pairs)
