"""Candidates for running a traced function, on the CPU, on GPUs, compiled: the fastest that is right is chosen."""
