"""The book's ``DataModule``: data with a training and a test part, which a user subclasses."""

from __future__ import annotations

from typing import Any

import numpy as np

from manyhands.training.book.vocabulary import HyperParameters
from manyhands.training.data.sources import Arrays, as_numpy


class DataModule(HyperParameters):
    """Data with a training and a test part. Subclasses give ``get_dataloader``."""

    # What makes the framework's tensors of NumPy's; each framework says it.
    native: Any = staticmethod(np.asarray)

    def __init__(self, root: str = "data", num_workers: int = 4) -> None:
        self.root = root
        self.num_workers = num_workers

    def get_dataloader(self, train: bool) -> Any:
        raise TypeError(f"{type(self).__name__} must say in get_dataloader(train) where its batches come from")

    def train_dataloader(self) -> Any:
        return self.get_dataloader(train=True)

    def val_dataloader(self) -> Any:
        return self.get_dataloader(train=False)

    def get_tensorloader(self, tensors: Any, train: bool, indices: slice = slice(0, None)) -> Any:
        """Batches of those tensors, shuffled for training."""
        rows = tuple(as_numpy(tensor)[indices] for tensor in tensors)
        return Arrays(rows, native=self.native, batch_size=getattr(self, "batch_size", None), shuffle=train)
