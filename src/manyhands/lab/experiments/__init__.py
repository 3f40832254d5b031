"""The experiments, one per module."""
