"""Chooses how to run a traced function: compares and times candidates for the CPU, for GPUs and with compiled code."""
