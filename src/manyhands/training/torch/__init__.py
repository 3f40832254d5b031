"""Training with PyTorch: models, figures of merit, and what else needs PyTorch's own layers."""
