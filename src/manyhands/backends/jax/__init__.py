"""JAX: its devices, its functions as graphs, and ``jax.jit`` as the way to run them."""
