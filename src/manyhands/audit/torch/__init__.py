"""PyTorch's hooks: which calls wait, the steps of an optimizer, and a virtual device that stands in for a GPU."""
