"""The tour in MXNet: devices, placing, training on all devices, parallel, hidden waits, and a run of another framework.

    python examples/frameworks/with_mxnet.py [CONVERTED_RUN]

What you hold is MXNet's own: arrays, contexts, a Gluon block and MXNet's optimizers.
"""

from __future__ import annotations

import sys

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from manyhands import mxnet as mh


def places(first: mx.Context, second: mx.Context) -> None:
    batch = mh.to({"X": mx.nd.ones((4, 3)), "y": mx.nd.arange(4)}, second)
    assert mh.to(batch, second) is batch  # a move that is already done is free
    print(
        "a batch on",
        mh.device_of(batch),
        "in shards of",
        [len(shard) for shard in mh.split(batch["X"], [first, second])],
    )


def make_net() -> nn.HybridBlock:
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(32, "relu", in_units=8), nn.Dense(3, in_units=32))
    net.initialize(mx.init.Xavier())
    return net


def trains(devices: list[mx.Context]) -> None:
    """The batch is global: two devices make the update of one."""
    random = np.random.default_rng(0)
    X = random.normal(size=(300, 8)).astype("float32")
    y = X[:, :3].argmax(1)
    for count in (1, 2):
        trainer = mh.Trainer(
            max_epochs=3, batch_size=30, devices=devices[:count], optimizer="adam", lr=0.01, quiet=True
        )
        print(trainer.fit(make_net(), (X[:240], y[:240]), (X[240:], y[240:])))


def runs_in_parallel() -> None:
    """MXNet's engine runs the function, and ``explain`` says so."""

    @mh.parallel
    def branches(x: mx.nd.NDArray) -> mx.nd.NDArray:
        return mx.nd.add_n(*[mx.nd.tanh(mx.nd.dot(x, x, transpose_b=True)) * scale for scale in (1.0, 2.0, 3.0)])

    branches(mx.nd.ones((64, 64)))
    branches(mx.nd.ones((64, 64)))
    print(branches.explain().splitlines()[0])


def waits() -> None:
    with mh.guard("count") as seen:
        mx.nd.ones((1,)).asscalar()  # the host waits for a value
    print("hidden waits:", len(seen))


def loads(run: str) -> None:
    """A run of another framework, after ``manyhands convert RUN --to mxnet``."""
    print("loaded:", type(mh.load_model(run)).__name__)


if __name__ == "__main__":
    devices = list(mh.virtual_devices(2))  # on GPUs: mh.try_all_gpus()
    places(*devices)
    trains(devices)
    runs_in_parallel()
    waits()
    for run in sys.argv[1:]:
        loads(run)
