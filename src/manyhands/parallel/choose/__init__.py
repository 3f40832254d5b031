"""Chooses how a traced function is run: candidates for the CPU, for GPUs and compiled are compared and timed."""
