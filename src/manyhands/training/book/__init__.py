"""What the textbook's chapters need in every framework."""
