"""``torch.cuda`` while virtual devices stand in for GPUs: code written for GPUs runs unchanged."""
