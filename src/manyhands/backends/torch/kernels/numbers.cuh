// Types of numbers that kernels read and write sixteen bytes at a time: a "vector" of 4 or 8 numbers.
//
// Kernels compute in float. `unpack` converts a vector to float, `packed` converts it back; `load` and `store` are for
// single numbers.

struct Float {
    static constexpr int count = 4;
    static __device__ void unpack(uint4 bits, float* v) {
        v[0] = __uint_as_float(bits.x), v[1] = __uint_as_float(bits.y);
        v[2] = __uint_as_float(bits.z), v[3] = __uint_as_float(bits.w);
    }
    static __device__ uint4 packed(const float* v) {
        return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
    }
    static __device__ float rounded(float value) { return value; }
    static __device__ float load(const void* from, int at) { return ((const float*)from)[at]; }
    static __device__ void store(void* to, int at, float value) { ((float*)to)[at] = value; }
};

// 16-bit numbers, two in a word; N converts them to float and back.
template <class N>
struct Pairs {
    static constexpr int count = 8;
    static __device__ void unpack(uint4 bits, float* v) {
        unsigned int words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; i++) v[2 * i] = N::low(words[i]), v[2 * i + 1] = N::high(words[i]);
    }
    static __device__ uint4 packed(const float* v) {
        return make_uint4(N::narrow(v[0], v[1]), N::narrow(v[2], v[3]), N::narrow(v[4], v[5]), N::narrow(v[6], v[7]));
    }
    static __device__ float rounded(float value) { return N::low(N::narrow(value, 0)); }
    static __device__ float load(const void* from, int at) { return N::low(((const unsigned short*)from)[at]); }
    static __device__ void store(void* to, int at, float value) {
        ((unsigned short*)to)[at] = (unsigned short)N::narrow(value, 0);
    }
};

struct Half : Pairs<Half> {
    static __device__ float wide(unsigned short bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ float low(unsigned int word) { return wide(word & 0xffff); }
    static __device__ float high(unsigned int word) { return wide(word >> 16); }
    static __device__ unsigned int narrow(float low, float high) {
        unsigned int bits;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
        return bits;
    }
};

struct BFloat : Pairs<BFloat> {
    static __device__ float low(unsigned int word) { return __uint_as_float(word << 16); }
    static __device__ float high(unsigned int word) { return __uint_as_float(word & 0xffff0000u); }
    static __device__ unsigned int narrow(float low, float high) {
        unsigned int bits;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
        return bits;
    }
};
