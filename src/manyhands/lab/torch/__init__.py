"""What the lab needs of this framework."""
