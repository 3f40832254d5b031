"""Batch normalisation over the whole batch, wherever its samples are.

The host issues the forward passes of the devices one by one, but a layer that normalises over all devices needs
the inputs of all of them. So a separate thread issues each device's pass, and the threads meet in such a layer: each
brings the sum of its samples, copies the sums of the others to its device, and continues with the same mean; then once
more for the squared deviations. Two samples with the values 1 and 3 on one device and one with 8 on another: sums 4 and
8, so the mean is 12 / 3 = 4; squared deviations 9 + 1 and 16, so the variance is 26 / 3.

The threads wait for each other to issue work, never for a device to compute it. MXNet records the copies between
devices, so that one backward pass over the losses of all devices gives the gradients of the whole batch. (MXNet's own
SyncBatchNorm gives every device the same weight, however many samples it has.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MethodType
from typing import Any, TypeVar

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import nn

from manyhands.errors import BadSettings
from manyhands.training.mxnet.modes import numpy_like
from manyhands.training.mxnet.step import replicas

Made = TypeVar("Made")

_here = threading.local()  # the seat of this thread, while it issues one device's pass


def check(model: Any) -> None:
    """Refuse layers that cannot meet."""
    for layer in replicas.layers(model):
        if getattr(layer, "_active", False):
            raise BadSettings(
                "batch_stats='global': a hybridized model runs as one operation, so its layers cannot exchange "
                "statistics with other devices: call net.hybridize(False) before"
            )
        if isinstance(layer, nn.basic_layers._BatchNorm) and type(layer) is not nn.BatchNorm:
            raise BadSettings(f"batch_stats='global': only nn.BatchNorm layers know how, not {type(layer).__name__}")


class GlobalBatchNorm:
    """Issues the passes of all devices at once; the model's layers meet in them."""

    def __init__(self, model: Any, devices: int) -> None:
        self._layers = [layer for layer in replicas.layers(model) if type(layer) is nn.BatchNorm]
        for layer in self._layers:
            layer.forward = MethodType(_forward, layer)
        self._threads = ThreadPoolExecutor(devices, thread_name_prefix="manyhands-device")

    def close(self) -> None:
        self._threads.shutdown()
        for layer in self._layers:
            del layer.forward

    def run(self, passes: Sequence[Callable[[], Made]]) -> list[Made]:
        """The results of all passes; raises the first error of any of them."""
        exchange, numpy_mode = _Exchange(len(passes)), bool(mx.util.is_np_array())

        def work(seat: int) -> Made:
            _here.seat = (exchange, seat)
            try:
                with numpy_like(numpy_mode):
                    return passes[seat]()
            except BaseException:
                exchange.barrier.abort()  # or the other threads would never return
                raise
            finally:
                _here.seat = None

        issued = [self._threads.submit(work, seat) for seat in range(len(passes))]
        errors = [error for future in issued if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in issued]


class _Exchange:
    """Where the threads of one step exchange arrays, in the order of the layers."""

    def __init__(self, parties: int) -> None:
        self.barrier = threading.Barrier(parties)
        self._brought: list[list[Any]] = []
        self._rounds = [0] * parties
        self._parties = parties
        self._lock = threading.Lock()

    def exchange(self, seat: int, value: Any) -> list[Any]:
        """The values of all threads in this round."""
        number = self._rounds[seat]
        self._rounds[seat] += 1
        with self._lock:
            while len(self._brought) <= number:
                self._brought.append([None] * self._parties)
        self._brought[number][seat] = value
        self.barrier.wait()
        return self._brought[number]


def _forward(layer: Any, x: Any) -> Any:
    seat = getattr(_here, "seat", None)
    if seat is None or not autograd.is_training() or layer._kwargs["use_global_stats"]:
        return type(layer).forward(layer, x)
    exchange, seat_number = seat
    kwargs, device = layer._kwargs, x.context
    axis = kwargs["axis"] % len(x.shape)
    axes = tuple(number for number in range(len(x.shape)) if number != axis)
    count = x.size // x.shape[axis]
    brought = exchange.exchange(seat_number, (x.sum(axis=axes, keepdims=True), count))
    whole = sum(samples for _, samples in brought)
    mean = _sum([value for value, _ in brought], device) / whole
    away = x - mean
    brought = exchange.exchange(seat_number, (away * away).sum(axis=axes, keepdims=True))
    variance = _sum(brought, device) / whole
    shape = tuple(-1 if number == axis else 1 for number in range(len(x.shape)))
    result = away * (variance + kwargs["eps"]) ** -0.5
    if not kwargs["fix_gamma"]:
        result = result * layer.gamma.data(device).reshape(shape)
    before = np.float32(kwargs["momentum"])  # as MXNet's own layer has it, also where it computes in float64
    with autograd.pause():
        for running, now in ((layer.running_mean, mean), (layer.running_var, variance)):
            array = running.data(device)
            array[:] = array * float(before) + now.reshape((-1,)) * float(1 - before)
    return result + layer.beta.data(device).reshape(shape)


def _sum(parts: Sequence[Any], device: mx.Context) -> Any:
    """The sum on one device, in the order of the seats: the same everywhere."""
    total = parts[0].as_in_context(device)
    for part in parts[1:]:
        total = total + part.as_in_context(device)
    return total
