"""The tour in TensorFlow: devices, placing, training, parallel, hidden waits, and a run of another framework.

    python examples/frameworks/with_tensorflow.py [CONVERTED_RUN]

What you hold is TensorFlow's own: tensors, device names, a Keras model and Keras's optimizer.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

from manyhands import tensorflow as mh


def places(first: str, second: str) -> None:
    batch = mh.to({"X": tf.ones((4, 3)), "y": tf.range(4)}, second)
    assert mh.to(batch, second) is batch  # a move that is already done is free
    with second:  # a device is also a context
        Z = tf.ones((4, 3)) + batch["X"]
    mh.check_same_device(batch, Z)  # TensorFlow itself would copy across devices in silence
    print("a batch on", mh.device_of(batch), "in shards of", [len(shard) for shard in mh.split(Z, [first, second])])


def make_net() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(3)])


def trains(devices: list[str]) -> None:
    """The batch is global: two devices make the update of one."""
    random = np.random.default_rng(0)
    X = random.normal(size=(300, 8)).astype("float32")
    y = X[:, :3].argmax(1)
    for count in (1, 2):
        trainer = mh.Trainer(
            max_epochs=3,
            batch_size=30,
            devices=devices[:count],
            optimizer=keras.optimizers.Adam(0.01),
            quiet=True,
        )
        print(trainer.fit(make_net(), (X[:240], y[:240]), (X[240:], y[240:])))


def runs_in_parallel() -> None:
    """``tf.function`` runs the function, and ``explain`` says so."""

    @mh.parallel
    def branches(x: tf.Tensor) -> tf.Tensor:
        return tf.add_n([tf.tanh(tf.matmul(x, x, transpose_b=True)) * scale for scale in (1.0, 2.0, 3.0)])

    branches(tf.ones((64, 64)))
    branches(tf.ones((64, 64)))
    print(branches.explain().splitlines()[0])


def waits() -> None:
    with mh.guard("count") as seen:
        float(tf.ones(()))  # the host waits for a value
    print("hidden waits:", len(seen))


def loads(run: str) -> None:
    """A run of another framework, after ``manyhands convert RUN --to tensorflow``."""
    print("loaded:", type(mh.load_model(run)).__name__)


if __name__ == "__main__":
    devices = list(mh.virtual_devices(2))  # before the first tensor; on GPUs: mh.try_all_gpus()
    places(*devices)
    trains(devices)
    runs_in_parallel()
    waits()
    for run in sys.argv[1:]:
        loads(run)
