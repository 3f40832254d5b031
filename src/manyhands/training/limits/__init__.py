"""Limits of a job: of steps, time and data; signals that stop it; ``find_batch_size``, the largest batch that fits."""
