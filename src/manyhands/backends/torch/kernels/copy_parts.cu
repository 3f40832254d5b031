// Copies parts of memory to other places, all in one launch. Each block copies one piece of CHUNK bytes:
//
//     part      0           1     2                      first = {0, 3, 4}
//     blocks    0  1  2     3     4  5  6  7
//
// The addresses are arguments of the kernel, so that they can be changed in a captured graph. PARTS and CHUNK are
// defined when this is compiled. A part without an address is skipped.

struct Parts {
    const char* from[PARTS];
    char* to[PARTS];
    long long bytes[PARTS];
    long long first[PARTS];  // the part's first block
};

// One block copies all whole words of these bytes; each thread has four in flight at once.
template <typename Word>
__device__ void copy_words(const char* from, char* to, long long bytes) {
    const Word* source = reinterpret_cast<const Word*>(from);
    Word* target = reinterpret_cast<Word*>(to);
    const int count = bytes / sizeof(Word), step = blockDim.x;
    int i = threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        const Word a = source[i], b = source[i + step], c = source[i + 2 * step], d = source[i + 3 * step];
        target[i] = a;
        target[i + step] = b;
        target[i + 2 * step] = c;
        target[i + 3 * step] = d;
    }
    for (; i < count; i += step) target[i] = source[i];
    for (int j = count * sizeof(Word) + threadIdx.x; j < bytes; j += step) to[j] = from[j];  // less than a word
}

__device__ void copy_piece(const Parts& parts) {
    int part = 0, after = PARTS;  // the last part whose first block is not after this one
    while (after - part > 1) {
        const int middle = (part + after) / 2;
        if (parts.first[middle] <= blockIdx.x)
            part = middle;
        else
            after = middle;
    }
    const char* from = parts.from[part];
    char* to = parts.to[part];
    if (from == nullptr || to == nullptr || from == to) return;
    const long long begin = (blockIdx.x - parts.first[part]) * CHUNK, left = parts.bytes[part] - begin;
    const long long bytes = left < CHUNK ? left : CHUNK;
    from += begin;
    to += begin;
    using Address = unsigned long long;
    const Address odd = reinterpret_cast<Address>(from) | reinterpret_cast<Address>(to);
    if (odd % 16 == 0)
        copy_words<int4>(from, to, bytes);
    else if (odd % 4 == 0)
        copy_words<int>(from, to, bytes);
    else if (odd % 2 == 0)
        copy_words<short>(from, to, bytes);
    else
        copy_words<char>(from, to, bytes);
}

// The same kernel under two names: a graph may have one of each, and the name distinguishes them.
extern "C" __global__ void copy_in(const __grid_constant__ Parts parts) { copy_piece(parts); }
extern "C" __global__ void copy_out(const __grid_constant__ Parts parts) { copy_piece(parts); }
