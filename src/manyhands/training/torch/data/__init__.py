"""Samples of PyTorch datasets and loaders, on their way to the device."""
