"""MXNet: its contexts, its operations as graphs, and ``CachedOp`` as the way to run them."""
