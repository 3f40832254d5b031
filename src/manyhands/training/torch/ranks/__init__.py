"""What the ranks of a job exchange: gradients, BatchNorm statistics, measured speeds."""
