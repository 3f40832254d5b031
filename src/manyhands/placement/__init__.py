"""The verbs that find devices and put tensors on them."""
