"""Run folders and checkpoints: complete on disk, or not there."""
