"""Runs a planned trace: CUDA graphs, streams, CPU threads."""
