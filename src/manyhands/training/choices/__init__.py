"""What the options of a trainer mean: which devices, which optimizer, and which option a misspelt name stands for."""
