"""Worker processes, one per rank, and the job on its way to them."""
