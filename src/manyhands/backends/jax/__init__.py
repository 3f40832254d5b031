"""JAX: its devices, how functions are handed to ``jax.jit``, and what explicit tasks need of it."""
