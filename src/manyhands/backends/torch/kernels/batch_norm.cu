// Batch normalisation with what follows it, for numbers that lie channel by channel (channels_last, or rows x channels).
//
// A layer's output is a matrix: one row for each place of each image, one column for each channel. Sixteen bytes, a
// "vector" of 4 or 8 neighbouring channels, are read at a time. A block of threads is a rectangle of vectors; blockIdx.y
// says which columns it works on, and it goes down the rows in strides of the whole grid:
//
//     columns   0 ..  31 | 32 .. 63           grid of 3 x 2 blocks, each 32 vectors wide and 16 rows high
//     rows 0-15   (0,0)  |  (0,1)
//         16-31   (1,0)  |  (1,1)
//         32-47   (2,0)  |  (2,1)
//         48-63   (0,0)  |  (0,1)             again the first
//
// Sums over all rows: each thread's own, then the block's, then the last block to finish adds up those of all blocks.
// Which one that is makes no difference, the order of the additions is always the same: so the results are, to the bit.
//
// What one operation of PyTorch's would have rounded before the next one took it is rounded here too (T::rounded). So
// results differ from those of separate operations only by the order in which statistics are summed.
//
// NUMBER is given by who compiles this: Float, Half or BFloat.

constexpr int THREADS = 512;  // of a block, at most
constexpr int WIDEST = 32;    // vectors, of a block
constexpr int MOST = 8;       // numbers in a vector, at most

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
};

// Numbers of sixteen bits, two in a word; N says how they are made wide and narrow.
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

typedef NUMBER T;
constexpr int V = T::count;

// Where a thread works.
struct Place {
    int column, row, stride;  // its vector in a row, its first row, and how far it is to its next one
    bool inside;
    __device__ Place(int vectors) {
        column = blockIdx.y * blockDim.x + threadIdx.x;
        row = blockIdx.x * blockDim.y + threadIdx.y;
        stride = gridDim.x * blockDim.y;
        inside = column < vectors;
    }
};

// Reads some rows of a thread at once: they are on their way while others are worked on.
template <int COUNT>
__device__ void load(uint4* bits, const uint4* from, const Place& place, int row, int rows, int vectors) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int at = row + k * place.stride;
        if (at < rows) bits[k] = from[(size_t)at * vectors + place.column];
    }
}

__device__ int thread_number() { return threadIdx.y * blockDim.x + threadIdx.x; }

__device__ void load_channels(const float* from, int column, float* values, float otherwise) {
#pragma unroll
    for (int i = 0; i < V; i++) values[i] = from ? from[column * V + i] : otherwise;
}

// Whether this block is the last of its columns to come here: what the others wrote before is then visible.
__device__ bool is_last(unsigned int* tickets) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (thread_number() == 0) {
        last = atomicAdd(&tickets[blockIdx.y], 1) == gridDim.x - 1;
        if (last) tickets[blockIdx.y] = 0;  // for the next launch
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

// Adds two numbers of each channel up over all threads of all blocks. True for the threads that have the sums in the
// end: each of them those of four channels, from "channel" on. "partial" holds two rows of channels for each block.
__device__ bool added_up(
    const float* first, const float* second, float* partial, unsigned int* tickets, int vectors, int& channel,
    float4& one, float4& other) {
    __shared__ float ones[MOST][THREADS], others[MOST][THREADS];
    int me = thread_number(), all = blockDim.x * blockDim.y, channels = vectors * V;
    int column = blockIdx.y * blockDim.x + threadIdx.x;

    // The block's.
#pragma unroll
    for (int i = 0; i < V; i++) ones[i][me] = first[i], others[i][me] = second[i];
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half) {
            int mate = me + half * blockDim.x;
#pragma unroll
            for (int i = 0; i < V; i++) ones[i][me] += ones[i][mate], others[i][me] += others[i][mate];
        }
    }
    if (threadIdx.y == 0 && column < vectors) {
        float* mine = partial + (size_t)blockIdx.x * 2 * channels + column * V;
#pragma unroll
        for (int i = 0; i < V; i++) mine[i] = ones[i][me], mine[channels + i] = others[i][me];
    }
    if (!is_last(tickets)) return false;

    // All blocks': a thread for four channels, and as many groups of such threads as there are.
    int width = blockDim.x * V / 4, groups = all / width, group = me / width;
    channel = blockIdx.y * blockDim.x * V + me % width * 4;
    one = other = make_float4(0, 0, 0, 0);
    if (channel < channels) {
#pragma unroll 8
        for (int block = group; block < gridDim.x; block += groups) {
            const float* from = partial + (size_t)block * 2 * channels + channel;
            float4 a = __ldcg((const float4*)from), b = __ldcg((const float4*)(from + channels));
            one.x += a.x, one.y += a.y, one.z += a.z, one.w += a.w;
            other.x += b.x, other.y += b.y, other.z += b.z, other.w += b.w;
        }
    }
    float* sums[8] = {&one.x, &one.y, &one.z, &one.w, &other.x, &other.y, &other.z, &other.w};
    for (int half = groups / 2; half > 0; half /= 2) {
        __syncthreads();
        if (group >= half && group < 2 * half)
#pragma unroll
            for (int i = 0; i < 8; i++) ones[i][me] = *sums[i];
        __syncthreads();
        if (group < half)
#pragma unroll
            for (int i = 0; i < 8; i++) *sums[i] += ones[i][me + half * width];
    }
    return group == 0 && channel < channels;
}

// Mean and deviation of each channel. Differences from a number near the mean are summed up, so that squares lose no
// digits: from the mean of a few rows, the same ones for all threads.
extern "C" __global__ void __launch_bounds__(THREADS) statistics(
    const uint4* x, float* partial, float* mean, float* deviation, float* running_mean, float* running_variance,
    unsigned int* tickets, int rows, int vectors, int epsilon_bits, int momentum_bits) {
    constexpr int AT_ONCE = 4, FEW = 4;
    __shared__ float middles[WIDEST * MOST];
    Place place(vectors);
    float near[V] = {}, sum[V] = {}, square[V] = {};
    if (place.inside) {
        uint4 few[FEW], bits[AT_ONCE];
#pragma unroll
        for (int k = 0; k < FEW; k++) few[k] = x[(size_t)(rows / FEW) * k * vectors + place.column];
        load<AT_ONCE>(bits, x, place, place.row, rows, vectors);
#pragma unroll
        for (int k = 0; k < FEW; k++) {
            float v[V];
            T::unpack(few[k], v);
#pragma unroll
            for (int i = 0; i < V; i++) near[i] += v[i] / FEW;
        }
#pragma unroll
        for (int i = 0; i < V; i++)
            if (threadIdx.y == 0) middles[threadIdx.x * V + i] = near[i];
        for (int row = place.row; row < rows;) {
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                if (row + k * place.stride >= rows) continue;
                float v[V];
                T::unpack(bits[k], v);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    float difference = v[i] - near[i];
                    sum[i] += difference;
                    square[i] += difference * difference;
                }
            }
            row += AT_ONCE * place.stride;
            load<AT_ONCE>(bits, x, place, row, rows, vectors);
        }
    }
    int channel;
    float4 sums, squares;
    if (!added_up(sum, square, partial, tickets, vectors, channel, sums, squares)) return;
    const float s[4] = {sums.x, sums.y, sums.z, sums.w}, q[4] = {squares.x, squares.y, squares.z, squares.w};
    for (int i = 0; i < 4; i++) {
        int which = channel + i;
        float offset = s[i] / rows, apart = q[i] - s[i] * offset;
        if (apart < 0) apart = 0;  // by rounding; what is no number stays so, which fmaxf would hide
        float middle = middles[which - blockIdx.y * blockDim.x * V] + offset;
        mean[which] = middle;
        deviation[which] = rsqrtf(apart / rows + __int_as_float(epsilon_bits));
        if (running_mean) {
            float momentum = __int_as_float(momentum_bits);
            running_mean[which] = (1 - momentum) * running_mean[which] + momentum * middle;
            running_variance[which] = (1 - momentum) * running_variance[which] + momentum * (apart / (rows - 1));
        }
    }
}

// The columns of a normalisation: y = w * (x - mean) * deviation + b.
struct Normal {
    float mean[V], deviation[V], weight[V], bias[V];
    __device__ Normal(const float* m, const float* d, const float* w, const float* b, int column) {
        load_channels(m, column, mean, 0.f);
        load_channels(d, column, deviation, 1.f);
        load_channels(w, column, weight, 1.f);
        load_channels(b, column, bias, 0.f);
    }
    __device__ float operator()(float x, int i) const {
        return T::rounded(weight[i] * (x - mean[i]) * deviation[i] + bias[i]);
    }
};

template <bool RELU, bool ADDED>
__device__ void apply(
    uint4* y, const uint4* x, const float* mean, const float* deviation, const float* weight, const float* bias,
    const uint4* added, int rows, int vectors) {
    constexpr int AT_ONCE = 4;
    Place place(vectors);
    if (!place.inside) return;
    Normal normal(mean, deviation, weight, bias, place.column);
    for (int row = place.row; row < rows; row += AT_ONCE * place.stride) {
        uint4 bits[AT_ONCE], more[AT_ONCE];
        load<AT_ONCE>(bits, x, place, row, rows, vectors);
        if (ADDED) load<AT_ONCE>(more, added, place, row, rows, vectors);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            int at = row + k * place.stride;
            if (at >= rows) continue;
            float v[V], a[V];
            T::unpack(bits[k], v);
            if (ADDED) T::unpack(more[k], a);
#pragma unroll
            for (int i = 0; i < V; i++) {
                float value = normal(v[i], i);
                if (ADDED) value += a[i];
                v[i] = RELU && value < 0 ? 0.f : value;
            }
            y[(size_t)at * vectors + place.column] = T::packed(v);
        }
    }
}

#define APPLY(name, RELU, ADDED)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                \
        uint4* y, const uint4* x, const float* mean, const float* deviation, const float* weight,              \
        const float* bias, const uint4* added, int rows, int vectors) {                                        \
        apply<RELU, ADDED>(y, x, mean, deviation, weight, bias, added, rows, vectors);                         \
    }
APPLY(apply_, false, false)
APPLY(apply_relu, true, false)
APPLY(apply_added, false, true)
APPLY(apply_added_relu, true, true)

// Which gradients a ReLU behind the normalisation let through: all (there was none), those where the normalisation, made
// again, is above zero, or those where the result of the ReLU is.
enum Mask { ALL, AGAIN, RESULT };

template <Mask MASK>
__device__ void mask(float* gradient, const float* x, const float* result, const Normal& normal) {
#pragma unroll
    for (int i = 0; i < V; i++) {
        if (MASK == AGAIN && normal(x[i], i) <= 0) gradient[i] = 0;
        if (MASK == RESULT && result[i] <= 0) gradient[i] = 0;
    }
}

// Gradients of weight and bias; and, where "kept" is given, what the ReLU let through. SUM: the gradient is the sum of two.
template <Mask MASK, bool KEEP, bool SUM>
__device__ void reduce(
    const uint4* gradient, const uint4* more, const uint4* x, const uint4* result, uint4* kept, const float* mean,
    const float* deviation, const float* weight, const float* bias, float* partial, float* for_weight,
    float* for_bias, unsigned int* tickets, int rows, int vectors) {
    constexpr int AT_ONCE = 2;
    Place place(vectors);
    float sum[V] = {}, product[V] = {};
    if (place.inside) {
        Normal normal(mean, deviation, weight, bias, place.column);
        for (int row = place.row; row < rows; row += AT_ONCE * place.stride) {
            uint4 bits_g[AT_ONCE], bits_m[AT_ONCE], bits_x[AT_ONCE], bits_r[AT_ONCE];
            load<AT_ONCE>(bits_g, gradient, place, row, rows, vectors);
            if (SUM) load<AT_ONCE>(bits_m, more, place, row, rows, vectors);
            load<AT_ONCE>(bits_x, x, place, row, rows, vectors);
            if (MASK == RESULT) load<AT_ONCE>(bits_r, result, place, row, rows, vectors);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                int at = row + k * place.stride;
                if (at >= rows) continue;
                float g[V], m[V], v[V], r[V];
                T::unpack(bits_g[k], g);
                if (SUM) {
                    T::unpack(bits_m[k], m);
#pragma unroll
                    for (int i = 0; i < V; i++) g[i] = T::rounded(g[i] + m[i]);
                }
                T::unpack(bits_x[k], v);
                if (MASK == RESULT) T::unpack(bits_r[k], r);
                mask<MASK>(g, v, r, normal);
                if (KEEP) kept[(size_t)at * vectors + place.column] = T::packed(g);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    sum[i] += g[i];
                    product[i] += g[i] * (v[i] - normal.mean[i]);
                }
            }
        }
    }
    int channel;
    float4 sums, products;
    if (!added_up(sum, product, partial, tickets, vectors, channel, sums, products)) return;
    const float s[4] = {sums.x, sums.y, sums.z, sums.w}, p[4] = {products.x, products.y, products.z, products.w};
    for (int i = 0; i < 4; i++) {
        for_bias[channel + i] = s[i];
        for_weight[channel + i] = p[i] * deviation[channel + i];
    }
}

#define REDUCE(name, MASK, KEEP, SUM)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                \
        const uint4* gradient, const uint4* more, const uint4* x, const uint4* result, uint4* kept,            \
        const float* mean, const float* deviation, const float* weight, const float* bias, float* partial,     \
        float* for_weight, float* for_bias, unsigned int* tickets, int rows, int vectors) {                    \
        reduce<MASK, KEEP, SUM>(                                                                               \
            gradient, more, x, result, kept, mean, deviation, weight, bias, partial, for_weight, for_bias,     \
            tickets, rows, vectors);                                                                           \
    }
REDUCE(reduce_all, ALL, false, false)
REDUCE(reduce_again, AGAIN, false, false)
REDUCE(reduce_result, RESULT, false, false)
REDUCE(reduce_again_keep, AGAIN, true, false)
REDUCE(reduce_result_keep, RESULT, true, false)
REDUCE(reduce_again_keep_sum, AGAIN, true, true)
REDUCE(reduce_result_keep_sum, RESULT, true, true)

// The gradient of the input, once those of weight and bias are there.
template <Mask MASK>
__device__ void backward(
    uint4* for_x, const uint4* gradient, const uint4* x, const uint4* result, const float* mean,
    const float* deviation, const float* weight, const float* bias, const float* for_weight, const float* for_bias,
    int rows, int vectors) {
    constexpr int AT_ONCE = 2;
    Place place(vectors);
    if (!place.inside) return;
    Normal normal(mean, deviation, weight, bias, place.column);
    float share[V], slope[V];  // of each gradient what goes into the mean, and into the deviation
    load_channels(for_bias, place.column, share, 0.f);
    load_channels(for_weight, place.column, slope, 0.f);
#pragma unroll
    for (int i = 0; i < V; i++) share[i] /= rows, slope[i] *= normal.deviation[i] / rows;
    for (int row = place.row; row < rows; row += AT_ONCE * place.stride) {
        uint4 bits_g[AT_ONCE], bits_x[AT_ONCE], bits_r[AT_ONCE];
        load<AT_ONCE>(bits_g, gradient, place, row, rows, vectors);
        load<AT_ONCE>(bits_x, x, place, row, rows, vectors);
        if (MASK == RESULT) load<AT_ONCE>(bits_r, result, place, row, rows, vectors);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            int at = row + k * place.stride;
            if (at >= rows) continue;
            float g[V], v[V], r[V];
            T::unpack(bits_g[k], g);
            T::unpack(bits_x[k], v);
            if (MASK == RESULT) T::unpack(bits_r[k], r);
            mask<MASK>(g, v, r, normal);
#pragma unroll
            for (int i = 0; i < V; i++)
                g[i] = (g[i] - share[i] - (v[i] - normal.mean[i]) * slope[i]) * (normal.deviation[i] * normal.weight[i]);
            for_x[(size_t)at * vectors + place.column] = T::packed(g);
        }
    }
}

#define BACKWARD(name, MASK)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                \
        uint4* for_x, const uint4* gradient, const uint4* x, const uint4* result, const float* mean,           \
        const float* deviation, const float* weight, const float* bias, const float* for_weight,               \
        const float* for_bias, int rows, int vectors) {                                                        \
        backward<MASK>(                                                                                        \
            for_x, gradient, x, result, mean, deviation, weight, bias, for_weight, for_bias, rows, vectors);   \
    }
BACKWARD(backward_all, ALL)
BACKWARD(backward_again, AGAIN)
BACKWARD(backward_result, RESULT)
