"""Weight gradients beside the backward pass, on lanes of their own."""
