"""What experiments need of MXNet (:mod:`manyhands.lab.operations`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from manyhands.backends.mxnet.devices import matmul as matmul


def tensor(values: Any) -> Any:
    return mx.nd.array(values, ctx=mx.cpu(), dtype=values.dtype)


def numpy(value: Any) -> Any:
    return value.asnumpy() if isinstance(value, mx.nd.NDArray) else value


norm, relu, transpose = mx.nd.norm, mx.nd.relu, mx.nd.transpose


def join(tensors: Sequence[Any]) -> Any:
    return mx.nd.concat(*(x.reshape((-1,)) for x in tensors), dim=0)


def cut(joined: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    return [joined[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]


def number(x: Any, index: int) -> float:
    return float(x[0, index].asscalar())


def with_number(x: Any, index: int, value: float) -> Any:
    x[0, index] = value
    return x


def pin(x: Any) -> Any:
    return x.as_in_context(mx.cpu_pinned(0))
