"""What the ranks of a job share: gradients, BatchNorm statistics, measured speeds."""
