"""``optimizer="adamw"``: MXNet 1.9 has none."""

from __future__ import annotations

import mxnet as mx
import numpy as np

from manyhands.training.mxnet.optimizers import AdamW


def test_weight_decay_is_decoupled() -> None:
    """Two steps by the formula of the paper."""
    weights, mean, variance = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    ours = mx.nd.array(weights, dtype="float64")
    optimizer = AdamW(learning_rate=0.1, wd=0.5)
    state = optimizer.create_state(0, ours)
    for step, gradient in enumerate((np.array([0.3, -0.1]), np.array([0.2, 0.4])), 1):
        optimizer.update(0, ours, mx.nd.array(gradient, dtype="float64"), state)
        mean, variance = 0.9 * mean + 0.1 * gradient, 0.999 * variance + 0.001 * gradient**2
        weights = weights * (1 - 0.1 * 0.5)
        weights -= 0.1 * (mean / (1 - 0.9**step)) / (np.sqrt(variance / (1 - 0.999**step)) + 1e-8)
    assert np.allclose(ours.asnumpy(), weights, rtol=1e-5)
    assert optimizer.wd == 0.5
