"""The fast step: captured in one CUDA graph, or planned as a whole."""
