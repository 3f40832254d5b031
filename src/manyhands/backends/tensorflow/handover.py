"""``parallel(fn)`` in TensorFlow: ``tf.function``.

Without AutoGraph, which would replace the type of many errors that the function raises: a branch on a tensor's value is
an error, as in ``jax.jit``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from manyhands.backends.tensorflow import tasks as tasks

name = "tensorflow"
RUN_AS = "tf.function"
SCHEDULER = "TensorFlow optimizes the graph, and its inter-op threads run what is ready"
PROFILER = "tf.profiler.experimental"


def hand_over(function: Callable[..., Any]) -> Callable[..., Any]:
    return tf.function(function, autograph=False)  # type: ignore[no-any-return]
