"""Training with PyTorch."""
