"""JAX's hooks."""
