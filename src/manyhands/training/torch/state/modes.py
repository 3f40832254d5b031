"""Training and evaluation mode: every layer gets its own mode back, because a user may have frozen some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def modes_preserved(net: object) -> Iterator[None]:
    """Afterwards every layer is in the mode that it was in."""
    modes = [(layer, layer.training) for layer in net.modules()] if isinstance(net, nn.Module) else []
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


@contextlib.contextmanager
def evaluating(net: object) -> Iterator[None]:
    """Within it the net is in evaluation mode: no dropout, and no statistics of the batch."""
    with modes_preserved(net):
        if isinstance(net, nn.Module):
            net.eval()
        yield


@contextlib.contextmanager
def statistics_kept(net: nn.Module) -> Iterator[None]:
    """Within it the net trains, except that normalisation over a batch uses its running statistics and keeps them."""
    with modes_preserved(net):
        for layer in net.modules():
            if hasattr(layer, "track_running_stats"):
                layer.eval()
        yield
