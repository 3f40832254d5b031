"""A training step: its function, its precision."""
