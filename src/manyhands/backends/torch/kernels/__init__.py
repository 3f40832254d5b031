"""Our own CUDA kernels, and the compiler that they need."""
