"""MXNet's values in a second pass of ``--prove``."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from manyhands.audit.mxnet import hooks
from manyhands.audit.prove.values import Values


class _MXNetValues(Values):
    def snapshot(self, value: Any) -> Any:
        return value.copy()

    def drain(self) -> None:
        mx.nd.waitall()

    def parameters(self, optimizer: Any) -> list[Any]:
        return [parameter.data().asnumpy() for parameter in optimizer._params if parameter.grad_req != "null"]


VALUES = _MXNetValues(hooks.on_device)
