"""Normalisation by our own kernels, fused with the operations around it, without a change to the model."""
