"""The sum of all losses, read in every step."""

import jax
import jax.numpy as jnp

weights = jnp.ones((16, 4))
x, y = jnp.ones((8, 16)), jnp.zeros(8, int)


@jax.jit
def update(weights, x, y):
    def loss_of(weights):
        return -jnp.mean(jax.nn.log_softmax(x @ weights)[jnp.arange(8), y])

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, loss


total = 0.0
for step in range(6):
    weights, loss = update(weights, x, y)
    total += loss.item()  # planted: read
