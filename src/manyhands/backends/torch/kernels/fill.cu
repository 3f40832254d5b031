// Writes the same four bytes repeatedly, like a memset.

extern "C" __global__ void fill(char* target, unsigned pattern, long long bytes) {
    const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    long long done = 0;
    if (reinterpret_cast<unsigned long long>(target) % 16 == 0) {
        const uint4 word = {pattern, pattern, pattern, pattern};
        for (long long i = first; i < bytes / 16; i += step) reinterpret_cast<uint4*>(target)[i] = word;
        done = bytes / 16 * 16;
    }
    for (long long i = done + first; i < bytes; i += step) target[i] = pattern >> (8 * (i % 4));
}
