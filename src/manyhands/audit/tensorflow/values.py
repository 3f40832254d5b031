"""TensorFlow's values in a second pass of ``--prove``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from manyhands.audit.prove.values import Values
from manyhands.audit.tensorflow import hooks


class _TensorFlowValues(Values):
    def snapshot(self, value: Any) -> Any:
        """Itself: an eager tensor never changes."""
        return value

    def drain(self) -> None:
        tf.test.experimental.sync_devices()

    def parameters(self, optimizer: Any) -> list[Any]:
        weights = getattr(optimizer, "_trainable_variables", [])  # Keras names them nowhere else
        return [variable.numpy() for variable in (*weights, *optimizer.variables)]

    def is_number(self, name: str, value: Any) -> bool:
        return super().is_number(name, value) or (name == "numpy" and value.shape.rank == 0)


VALUES = _TensorFlowValues(hooks.on_device)
