"""The book's training loop, which prints the loss of every minibatch; and the same loop, which keeps the losses.

manyhands audit book_loop.py printed        # or: kept
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from manyhands import jax as mh


def loss(weights: list[jax.Array], X: jax.Array, y: jax.Array) -> jax.Array:
    scores = jax.nn.relu(X @ weights[0]) @ weights[1]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1))


def step(weights: list[jax.Array], X: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    value, gradients = jax.value_and_grad(loss)(weights, X, y)
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], value


def train(way: str, minibatches: int, width: int = 256) -> list[float]:
    draw, device = np.random.default_rng(0), mh.try_gpu()
    shapes = (784, width), (width, 10)
    weights = [jax.device_put(draw.normal(0, 0.03, shape).astype("float32"), device) for shape in shapes]
    X = jax.device_put(draw.random((64, 784), dtype="float32"), device)
    y = jax.device_put(draw.integers(10, size=64), device)
    compiled, losses = jax.jit(step), []
    for minibatch in range(minibatches):
        weights, batch_loss = compiled(weights, X, y)
        if way == "printed":
            print(f"minibatch {minibatch}: loss {float(batch_loss):.3f}")
        losses.append(batch_loss)
    values: list[float] = mh.to(jnp.stack(losses), mh.cpu()).tolist()
    return values


if __name__ == "__main__":
    train(sys.argv[1], minibatches=30)
