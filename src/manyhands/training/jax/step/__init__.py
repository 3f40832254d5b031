"""A training step: how the batch lies on the devices, and what is computed over it."""
