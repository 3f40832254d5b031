"""The verbs: find devices, put tensors on them, split and gather, measure."""
