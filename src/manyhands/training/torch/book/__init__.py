"""The textbook's classes, models and functions for PyTorch."""
