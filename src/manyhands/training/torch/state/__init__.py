"""What belongs to a job beside its weights: saved, restored, and sent between processes."""
