"""Evaluation and prediction: metrics, and outputs that come to the host in pieces."""
