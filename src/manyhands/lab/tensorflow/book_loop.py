"""The book's training loop, which prints the loss of every minibatch; and the same loop, which keeps the losses.

manyhands audit book_loop.py printed        # or: kept
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from manyhands import tensorflow as mh


def train(way: str, minibatches: int, width: int = 256) -> list[float]:
    keras.utils.set_random_seed(0)
    with mh.try_gpu():
        net = keras.Sequential([keras.Input((784,)), keras.layers.Dense(width, "relu"), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.1)
        X, y = tf.random.uniform((64, 784)), tf.constant(np.random.default_rng(0).integers(10, size=64))

        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                value = loss(y, net(X))
            optimizer.apply_gradients(
                zip(tape.gradient(value, net.trainable_variables), net.trainable_variables, strict=True)
            )
            return value

        compiled, losses = tf.function(step), []
        for minibatch in range(minibatches):
            batch_loss = compiled()
            if way == "printed":
                print(f"minibatch {minibatch}: loss {float(batch_loss):.3f}")
            losses.append(batch_loss)
        values: list[float] = mh.to(tf.stack(losses), mh.cpu()).numpy().tolist()
    return values


if __name__ == "__main__":
    train(sys.argv[1], minibatches=30)
