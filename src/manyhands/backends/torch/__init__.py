"""PyTorch: devices, and the pipeline of ``parallel``: capture, guards, passes, kernels, run."""
