"""Our own normalisation kernels, fused with the surrounding operations; the model does not change."""
