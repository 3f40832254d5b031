"""A training step: how the batch is divided over the devices, and what is computed."""
