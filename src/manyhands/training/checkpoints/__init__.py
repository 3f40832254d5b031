"""Run folders and checkpoints: complete on disk, or absent."""
