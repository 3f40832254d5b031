"""The tour in JAX: devices, placing, training on all devices, parallel, hidden waits, and a run of another framework.

    python examples/frameworks/with_jax.py [CONVERTED_RUN]

What you hold is JAX's own: arrays, ``jax.Device``, a Flax module, an optimizer of optax.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from manyhands import jax as mh


def places(first: jax.Device, second: jax.Device) -> None:
    batch = mh.to({"X": jnp.ones((4, 3)), "y": jnp.arange(4)}, second)
    assert mh.to(batch, second) is batch  # a move that is already done is free
    print(
        "a batch on",
        mh.device_of(batch),
        "in shards of",
        [len(shard) for shard in mh.split(batch["X"], [first, second])],
    )


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 3, rngs=rngs)

    def __call__(self, x: jnp.ndarray) -> jnp.ndarray:
        return self.second(nnx.relu(self.first(x)))


def trains(devices: list[jax.Device]) -> None:
    """The batch is global: two devices make the update of one."""
    random = np.random.default_rng(0)
    X = random.normal(size=(300, 8)).astype("float32")
    y = X[:, :3].argmax(1)
    for count in (1, 2):
        net = Net(nnx.Rngs(0))
        trainer = mh.Trainer(
            max_epochs=3, batch_size=30, devices=devices[:count], optimizer=optax.adam(0.01), quiet=True
        )
        print(trainer.fit(net, (X[:240], y[:240]), (X[240:], y[240:])))


def runs_in_parallel() -> None:
    """``jax.jit`` runs the function, and ``explain`` says so."""

    @mh.parallel
    def branches(x: jnp.ndarray) -> jnp.ndarray:
        return sum(jnp.tanh(x @ x.T) * scale for scale in (1.0, 2.0, 3.0))

    branches(jnp.ones((64, 64)))
    branches(jnp.ones((64, 64)))
    print(branches.explain().splitlines()[0])


def waits() -> None:
    with mh.guard("count") as seen:
        float(jnp.ones(()))  # the host waits for a value
    print("hidden waits:", len(seen))


def loads(run: str) -> None:
    """A run of another framework, after ``manyhands convert RUN --to jax``."""
    print("loaded:", type(mh.load_model(run)).__name__)


if __name__ == "__main__":
    devices = list(mh.virtual_devices(2))  # before the first array; on GPUs: mh.try_all_gpus()
    places(*devices)
    trains(devices)
    runs_in_parallel()
    waits()
    for run in sys.argv[1:]:
        loads(run)
