"""CUDA kernels of our own, and the compiler that they need."""
