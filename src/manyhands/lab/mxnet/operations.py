"""What experiments need of MXNet (:mod:`manyhands.lab.operations`)."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from manyhands.backends.mxnet.devices import matmul as matmul


def tensor(values: Any) -> Any:
    return mx.nd.array(values, ctx=mx.cpu(), dtype=values.dtype)


def numpy(value: Any) -> Any:
    return value.asnumpy() if isinstance(value, mx.nd.NDArray) else value


def norm(x: Any) -> Any:
    return mx.nd.norm(x)


def relu(x: Any) -> Any:
    return mx.nd.relu(x)
