"""What is checked before the first step."""
