"""Figures of merit: how many predictions are right, on one device or on all.

Right answers are counted on the device, as whole numbers, and read once, at the end: the program never
waits for a device between two batches. Every sample counts once, whatever the sizes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from manyhands import tree
from manyhands.backends.torch import devices as _backend
from manyhands.device import Device
from manyhands.errors import BadBatch
from manyhands.placement.moves import Placement
from manyhands.training.book import accuracy_common

Split = Callable[[Any, Any, Sequence[torch.device]], tuple[Sequence[Any], Sequence[Any]]]

_place = Placement(_backend)


def accuracy(y_hat: torch.Tensor, y: torch.Tensor) -> float:
    """The number of predictions that are right.

    ``y_hat`` holds a score per class (classes in dimension 1), or the class numbers themselves.
    Reading the number waits for the device.
    """
    return float(_correct(y_hat, y))


def _correct(y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The number of right predictions, left on the device."""
    classes = y_hat.argmax(dim=1) if y_hat.dim() > 1 and y_hat.shape[1] > 1 else y_hat
    if classes.numel() != y.numel() or classes.shape[:1] != y.shape[:1]:
        raise BadBatch(
            f"predictions of shape {tuple(y_hat.shape)} and labels of shape {tuple(y.shape)} do not belong together: "
            "give one row of scores, or one class number, per label"
        )
    return (classes.reshape(y.shape).to(y.dtype) == y).sum()


def evaluate_accuracy_gpu(
    net: Callable[[Any], torch.Tensor],
    data_iter: Iterable[tuple[Any, torch.Tensor]],
    device: torch.device | Device | str | None = None,
) -> float:
    """The part of all samples that the net gets right, on one device (where the net is, if none is named)."""
    native = _device_for(net, device)
    counted, correct = 0, None
    with _evaluating(net):
        for X, y in data_iter:
            if native is not None:
                X, y = _to(X, native), _to(y, native)
            now = _correct(net(X), y)
            correct = now if correct is None else correct + now
            counted += y.numel()
    return accuracy_common.part(0 if correct is None else int(correct), counted)


def evaluate_accuracy_gpus(
    net: nn.Module,
    data_iter: Iterable[tuple[Any, torch.Tensor]],
    split_f: Split | None = None,
) -> float:
    """The part of all samples that the net gets right, on all GPUs (or virtual devices, or the CPU).

    Each batch is split over the devices; ``split_f(X, y, devices)`` gives the shards of ``X`` and those of ``y``
    where it is to be done in another way. The net stays where it is: the devices work on copies.
    """
    accuracy_common.check_model(isinstance(net, nn.Module), net, "torch.nn.Module")
    split = split_f or functools.partial(accuracy_common.split, _place)
    devices = accuracy_common.all_gpus(_place)
    counted = 0
    sums: list[Any] = [0] * len(devices)  # then one tensor on each device
    with _evaluating(net):
        replicas = [_replica(net, device) for device in devices]
        for X, y in data_iter:
            X_shards, y_shards = split(X, y, devices)
            accuracy_common.check_whole(X_shards, y_shards, y, devices)
            for i, (X_shard, y_shard) in enumerate(zip(X_shards, y_shards, strict=True)):
                if y_shard.numel():  # more devices than samples leave some without
                    sums[i] = sums[i] + _correct(replicas[i](X_shard), y_shard)
            counted += y.numel()
    return accuracy_common.part(sum(map(int, sums)), counted)


def _device_for(net: object, device: torch.device | Device | str | None) -> torch.device | None:
    """Where the samples have to go; None leaves them where they are (a function without parameters)."""
    on = list(dict.fromkeys(p.device for p in net.parameters())) if isinstance(net, nn.Module) else []
    if device is None:
        return on[0] if on else None
    return accuracy_common.destination(_place, on, device)


def _to(values: Any, device: torch.device) -> Any:
    return tree.map_leaves(lambda leaf: _place.to_leaf(leaf, device), values)


def _replica(net: nn.Module, device: torch.device) -> nn.Module:
    """The net itself where it is on the device, else a copy of it there."""
    if all(_backend.is_on(tensor, device) for _, tensor in _backend.model_tensors(net)):
        return net
    moved: nn.Module = _place.to_leaf(copy.deepcopy(net), device)
    return moved


@contextlib.contextmanager
def _evaluating(net: object) -> Iterator[None]:
    """No gradients and evaluation mode."""
    with torch.no_grad(), modes_kept(net):
        if isinstance(net, nn.Module):
            net.eval()
        yield


@contextlib.contextmanager
def modes_kept(net: object) -> Iterator[None]:
    """Afterwards every layer is in its own mode again, training or evaluation: one may be frozen."""
    modes = [(layer, layer.training) for layer in net.modules()] if isinstance(net, nn.Module) else []
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode
