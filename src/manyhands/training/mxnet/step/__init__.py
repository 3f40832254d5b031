"""A training step: replicas, and what is computed over the whole batch."""
