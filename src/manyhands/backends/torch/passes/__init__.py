"""Rewrites of a trace: operations are split, fused or batched."""
