"""How numbers are held in a step: the precision of products, and the memory format of images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from manyhands import tree
from manyhands.training.torch.data.batches import Batch


@dataclass
class NumberFormat:
    """How numbers are held: the precision of products, and the memory format of images."""

    autocast: torch.dtype | None = None
    channels_last: bool = False
    dtype: torch.dtype | None = None

    @contextlib.contextmanager
    def scope(self, device: torch.device) -> Iterator[None]:
        if self.autocast is None:
            yield
        else:
            with torch.autocast(device.type, dtype=self.autocast):
                yield

    def cast(self, batch: Batch) -> Batch:
        """The batch in the model's dtype and memory format; tensors that fit already are not copied."""
        if not self.channels_last and self.dtype is None:
            return batch
        if type(batch) is tuple:  # the usual one, without a tree: the compiler cannot look into those
            return tuple(
                self._cast_part(part) if isinstance(part, torch.Tensor) else self._cast_tree(part) for part in batch
            )
        return self._cast_tree(batch)

    def _cast_tree(self, part: Any) -> Any:
        return tree.map_leaves(self._cast_part, part)

    def _cast_part(self, part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        if self.dtype is not None and part.is_floating_point():
            part = part.to(self.dtype)
        if not self.channels_last or part.dim() != 4:
            return part
        part = part.contiguous(memory_format=torch.channels_last)
        _, channels, height, width = part.shape
        # With one channel both formats are the same memory: only the strides tell a convolution which one to choose.
        return part.as_strided(part.shape, (height * width, 1, width, 1)) if channels == 1 else part
