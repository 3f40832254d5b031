"""Weight gradients on side lanes, in parallel with the backward pass."""
