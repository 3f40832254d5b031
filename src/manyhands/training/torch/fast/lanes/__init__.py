"""Weight gradients beside the backward pass, on separate lanes."""
