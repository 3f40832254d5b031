"""What experiments need of MXNet."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from manyhands.backends.mxnet.devices import matmul as matmul


def tensor(values: Any) -> Any:
    return mx.nd.array(values, ctx=mx.cpu(), dtype=values.dtype)


def numpy(value: Any) -> Any:
    return value.asnumpy() if isinstance(value, mx.nd.NDArray) else value


norm, relu, transpose = mx.nd.norm, mx.nd.relu, mx.nd.transpose


def with_number(x: Any, index: int, value: float) -> Any:
    x[0, index] = value
    return x


# A copy in page-locked memory of the host; None if the framework has no such memory.
def pin(x: Any) -> Any:
    return x.as_in_context(mx.cpu_pinned(0))
