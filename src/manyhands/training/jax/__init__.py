"""Training with JAX: Flax NNX modules, Optax's optimizers, one compiled step over all devices."""
