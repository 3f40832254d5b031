"""What a running job shows: a progress bar, a table, a picture."""
