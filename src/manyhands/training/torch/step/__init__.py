"""One training step as written, exact on any number of ranks."""
