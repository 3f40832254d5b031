// Batch normalisation fused with the addition and the ReLU that follow it, for channels_last (or rows x channels).
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
// Sums over all rows are added up per thread, then per block, then over all blocks: by the last block to finish, or by
// every block, after it has waited for the others ("forward"). The order of the additions is the same in both cases, so
// the results are the same to the bit.
//
// Intermediate values that separate PyTorch operations would round are rounded here too (T::rounded). So results differ
// from those of separate operations only by the order in which statistics are summed.
//
// NUMBER is defined when this is compiled: Float, Half or BFloat.

#include "numbers.cuh"

constexpr int THREADS = 512;  // of a block, at most
constexpr int WIDEST = 32;    // vectors, of a block
constexpr int MOST = 8;       // numbers in a vector, at most

typedef NUMBER T;
constexpr int V = T::count;

// Where a thread works.
struct Place {
    int column, row, stride;  // its vector in a row, its first row, and the distance to its next row
    bool inside;
    __device__ Place(int vectors) {
        column = blockIdx.y * blockDim.x + threadIdx.x;
        row = blockIdx.x * blockDim.y + threadIdx.y;
        stride = gridDim.x * blockDim.y;
        inside = column < vectors;
    }
};

// Reads some rows of a thread at once: they are loaded while others are processed.
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

// A kernel may start while the previous one, which is also ours, ends: it reads that kernel's results after the wait.
__device__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether this block is the last of its columns to arrive here: then it sees what the others wrote before.
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

// Waits until all blocks of these columns have arrived; they have to run at the same time. When the last one arrives,
// the highest bit of a gate flips and the other bits are zero again, so the gate is ready for the next launch.
__device__ void all_come(unsigned int* gates) {
    __syncthreads();
    if (thread_number() == 0) {
        __threadfence();
        unsigned int* gate = &gates[blockIdx.y];
        unsigned int before = atomicAdd(gate, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u), now;
        do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(gate) : "memory");
        while (((before ^ now) & 0x80000000u) == 0);
        __threadfence();
    }
    __syncthreads();
}

// The memory in which a block adds up two sums for each of its channels, first all of one kind, then all of the other.
struct __align__(16) Sums {
    float of_parts[THREADS / 32 * 2 * WIDEST * MOST];  // of warps, then of blocks
    float all[2 * WIDEST * MOST];
    float near[WIDEST * MOST];
};

// Adds up two numbers of each channel over all threads of the block, and writes the sums to memory for other blocks.
__device__ void add_up_block(Sums& sums, float* first, float* second, float* partial) {
    int me = thread_number(), warp = me / 32, warps = blockDim.x * blockDim.y / 32;
    int channels = blockDim.x * V, count = 2 * channels;
#pragma unroll
    for (int i = 0; i < V; i++)
        for (int apart = blockDim.x; apart < 32; apart *= 2) {
            first[i] += __shfl_xor_sync(0xffffffffu, first[i], apart);
            second[i] += __shfl_xor_sync(0xffffffffu, second[i], apart);
        }
    if (me % 32 < blockDim.x) {
        float* mine = sums.of_parts + warp * count + threadIdx.x * V;
#pragma unroll
        for (int i = 0; i < V; i++) mine[i] = first[i], mine[channels + i] = second[i];
    }
    __syncthreads();
    float* ours = partial + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * count;
    for (int which = me; which < count; which += blockDim.x * blockDim.y) {
        float sum = 0;
        for (int part = 0; part < warps; part++) sum += sums.of_parts[part * count + which];
        ours[which] = sum;
    }
}

// Adds up the sums of all blocks of these columns, into sums.all.
__device__ void add_up_blocks(Sums& sums, const float* partial) {
    int me = thread_number(), all = blockDim.x * blockDim.y, count = 2 * blockDim.x * V;
    int width = count / 4, groups = all / width, group = me / width;  // a thread for four sums of some blocks
    const float4* from = (const float4*)(partial + (size_t)blockIdx.y * gridDim.x * count) + me % width;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int block = group; block < gridDim.x; block += groups) {
        float4 more = __ldcg(from + (size_t)block * width);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    ((float4*)sums.of_parts)[me] = sum;
    __syncthreads();
    for (int which = me; which < count; which += all) {
        float whole = 0;
        for (int part = 0; part < groups; part++) whole += sums.of_parts[part * count + which];
        sums.all[which] = whole;
    }
    __syncthreads();
}

// Reads rows of a layer and sums up each channel's differences from a number near its mean, so that their squares lose
// no digits. That number is the mean of a few rows, the same for all threads. HELD rows of a thread stay in registers.
template <int HELD>
__device__ void sum_up(
    Sums& sums, uint4* held, const uint4* x, const Place& place, float* sum, float* square, int rows, int vectors) {
    constexpr int AT_ONCE = 4, FEW = 4;
    if (!place.inside) return;
    float near[V] = {};
    uint4 few[FEW], bits[AT_ONCE];
#pragma unroll
    for (int k = 0; k < FEW; k++) few[k] = x[(size_t)(rows / FEW) * k * vectors + place.column];
    load<HELD>(held, x, place, place.row, rows, vectors);
#pragma unroll
    for (int k = 0; k < FEW; k++) {
        float v[V];
        T::unpack(few[k], v);
#pragma unroll
        for (int i = 0; i < V; i++) near[i] += v[i] / FEW;
    }
    if (threadIdx.y == 0)
#pragma unroll
        for (int i = 0; i < V; i++) sums.near[threadIdx.x * V + i] = near[i];
    int row = place.row + HELD * place.stride;
    load<AT_ONCE>(bits, x, place, row, rows, vectors);
    auto add = [&](uint4 numbers) {
        float v[V];
        T::unpack(numbers, v);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float difference = v[i] - near[i];
            sum[i] += difference;
            square[i] += difference * difference;
        }
    };
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if (place.row + k * place.stride < rows) add(held[k]);
    while (row < rows) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (row + k * place.stride < rows) add(bits[k]);
        row += AT_ONCE * place.stride;
        load<AT_ONCE>(bits, x, place, row, rows, vectors);
    }
}

// Mean and rstd of one of the block's channels, once all sums are known.
struct Statistics {
    float mean, rstd, variance;
    __device__ Statistics(const Sums& sums, int channel, int rows, int epsilon_bits) {
        float sum = sums.all[channel], offset = sum / rows, apart = sums.all[blockDim.x * V + channel] - sum * offset;
        if (apart < 0) apart = 0;  // by rounding; NaN stays NaN, which fmaxf would hide
        mean = sums.near[channel] + offset;
        rstd = rsqrtf(apart / rows + __int_as_float(epsilon_bits));
        variance = apart / (rows - 1);
    }
};

struct Kept {  // where statistics are stored; the running ones may be missing
    float *mean, *rstd, *running_mean, *running_variance;
    __device__ void keep(const Statistics& of, int channel, int momentum_bits) const {
        mean[channel] = of.mean, rstd[channel] = of.rstd;
        if (!running_mean) return;
        float momentum = __int_as_float(momentum_bits);
        running_mean[channel] = (1 - momentum) * running_mean[channel] + momentum * of.mean;
        running_variance[channel] = (1 - momentum) * running_variance[channel] + momentum * of.variance;
    }
};

// Mean and rstd of each channel.
extern "C" __global__ void __launch_bounds__(THREADS) statistics(
    const uint4* x, float* partial, float* mean, float* rstd, float* running_mean, float* running_variance,
    unsigned int* tickets, int rows, int vectors, int epsilon_bits, int momentum_bits) {
    __shared__ Sums sums;
    Place place(vectors);
    float sum[V] = {}, square[V] = {};
    uint4 held[4];
    let_next_begin();
    sum_up<4>(sums, held, x, place, sum, square, rows, vectors);
    add_up_block(sums, sum, square, partial);
    if (!is_last(tickets)) return;
    add_up_blocks(sums, partial);
    Kept kept{mean, rstd, running_mean, running_variance};
    int first = blockIdx.y * blockDim.x * V;
    for (int which = thread_number(); which < blockDim.x * V; which += blockDim.x * blockDim.y)
        if (first + which < vectors * V)
            kept.keep(Statistics(sums, which, rows, epsilon_bits), first + which, momentum_bits);
}

// The columns of a normalisation: y = w * (x - mean) * rstd + b.
struct Normal {
    float mean[V], rstd[V], weight[V], bias[V];
    __device__ Normal(const float* w, const float* b, int column) {
        load_channels(w, column, weight, 1.f);
        load_channels(b, column, bias, 0.f);
    }
    __device__ void take(const float* m, const float* d, int column) {
        load_channels(m, column, mean, 0.f);
        load_channels(d, column, rstd, 1.f);
    }
    __device__ float operator()(float x, int i) const {
        return T::rounded(weight[i] * (x - mean[i]) * rstd[i] + bias[i]);
    }
};

// The lower bound that a ReLU applies; without a ReLU there is none. NaN stays NaN.
__device__ float floor_of(int relu) { return relu ? 0.f : __int_as_float(0xff800000); }

// Writes some rows of a thread: "bits" are the numbers, "more" those to add.
template <bool ADDED, int COUNT>
__device__ void write(
    uint4* y, const uint4* bits, const uint4* more, const Normal& normal, float floor, const Place& place, int row,
    int rows, int vectors) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int at = row + k * place.stride;
        if (at >= rows) continue;
        float v[V], a[V];
        T::unpack(bits[k], v);
        if (ADDED) T::unpack(more[k], a);
#pragma unroll
        for (int i = 0; i < V; i++) {
            float value = normal(v[i], i);
            if (ADDED) value += a[i];
            v[i] = value < floor ? floor : value;
        }
        y[(size_t)at * vectors + place.column] = T::packed(v);
    }
}

template <bool ADDED>
__device__ void apply(
    uint4* y, const uint4* x, const float* mean, const float* rstd, const float* weight, const float* bias,
    const uint4* added, int relu, int rows, int vectors) {
    constexpr int AT_ONCE = 4;
    Place place(vectors);
    if (!place.inside) return;
    uint4 bits[AT_ONCE], more[AT_ONCE];
    load<AT_ONCE>(bits, x, place, place.row, rows, vectors);
    wait_for_last();
    Normal normal(weight, bias, place.column);
    normal.take(mean, rstd, place.column);
    for (int row = place.row; row < rows;) {
        if (ADDED) load<AT_ONCE>(more, added, place, row, rows, vectors);
        write<ADDED, AT_ONCE>(y, bits, more, normal, floor_of(relu), place, row, rows, vectors);
        row += AT_ONCE * place.stride;
        load<AT_ONCE>(bits, x, place, row, rows, vectors);
    }
}

// Statistics and normalisation in one kernel: all blocks run at the same time, and wait for each other in the middle.
// A thread still holds its first rows then. It reads the others from last to first: the last are still in the cache.
template <bool ADDED>
__device__ void forward(
    uint4* y, const uint4* x, const float* weight, const float* bias, const uint4* added, int relu, float* partial,
    const Kept& kept, unsigned int* gates, int rows, int vectors, int epsilon_bits, int momentum_bits) {
    constexpr int AT_ONCE = 4, HELD = 2 * AT_ONCE;
    __shared__ Sums sums;
    Place place(vectors);
    float sum[V] = {}, square[V] = {};
    uint4 held[HELD], more[AT_ONCE], next[AT_ONCE], next_more[AT_ONCE];
    sum_up<HELD>(sums, held, x, place, sum, square, rows, vectors);
    int column = place.inside ? place.column : 0;
    Normal normal(weight, bias, column);
    if (ADDED && place.inside) load<AT_ONCE>(more, added, place, place.row, rows, vectors);
    add_up_block(sums, sum, square, partial);
    all_come(gates);
    add_up_blocks(sums, partial);

    int first = blockIdx.y * blockDim.x * V, channels = blockDim.x * V;
    for (int which = thread_number(); which < channels; which += blockDim.x * blockDim.y) {
        Statistics found(sums, which, rows, epsilon_bits);
        sums.all[which] = found.mean, sums.all[channels + which] = found.rstd;
        if (blockIdx.x == 0 && first + which < vectors * V) kept.keep(found, first + which, momentum_bits);
    }
    __syncthreads();
    if (!place.inside) return;
    normal.take(sums.all, sums.all + channels, threadIdx.x);

    int step = AT_ONCE * place.stride, begin = place.row + HELD * place.stride;
    int row = begin < rows ? begin + (rows - 1 - begin) / step * step : begin - step;
    if (row >= begin) load<AT_ONCE>(next, x, place, row, rows, vectors);
    if (ADDED) load<AT_ONCE>(next_more, added, place, place.row + step, rows, vectors);
    float floor = floor_of(relu);
    write<ADDED, AT_ONCE>(y, held, more, normal, floor, place, place.row, rows, vectors);
    write<ADDED, AT_ONCE>(y, held + AT_ONCE, next_more, normal, floor, place, place.row + step, rows, vectors);
    for (; row >= begin; row -= step) {
        uint4 bits[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) bits[k] = next[k];
        if (ADDED) load<AT_ONCE>(more, added, place, row, rows, vectors);
        if (row - step >= begin) load<AT_ONCE>(next, x, place, row - step, rows, vectors);
        write<ADDED, AT_ONCE>(y, bits, more, normal, floor, place, row, rows, vectors);
    }
}

#define FORWARD(name, ADDED)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) apply##name(                                         \
        uint4* y, const uint4* x, const float* mean, const float* rstd, const float* weight,              \
        const float* bias, const uint4* added, int relu, int rows, int vectors) {                              \
        apply<ADDED>(y, x, mean, rstd, weight, bias, added, relu, rows, vectors);                         \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) forward##name(                                    \
        uint4* y, const uint4* x, const float* weight, const float* bias, const uint4* added, int relu,        \
        float* partial, float* mean, float* rstd, float* running_mean, float* running_variance,           \
        unsigned int* gates, int rows, int vectors, int epsilon_bits, int momentum_bits) {                     \
        Kept kept{mean, rstd, running_mean, running_variance};                                            \
        forward<ADDED>(                                                                                        \
            y, x, weight, bias, added, relu, partial, kept, gates, rows, vectors, epsilon_bits, momentum_bits);\
    }
FORWARD(, false)
FORWARD(_added, true)

// Which gradients pass the ReLU after the normalisation: all (no ReLU), those where the recomputed normalisation is
// above zero, or those where the result of the ReLU is.
enum Mask { ALL, AGAIN, RESULT };

template <Mask MASK>
__device__ void mask(float* gradient, const float* x, const float* result, const Normal& normal) {
#pragma unroll
    for (int i = 0; i < V; i++) {
        if (MASK == AGAIN && normal(x[i], i) <= 0) gradient[i] = 0;
        if (MASK == RESULT && result[i] <= 0) gradient[i] = 0;
    }
}

// Rows of a thread, loaded while others are processed; SUM: the gradient is the sum of two.
template <Mask MASK, bool SUM, int COUNT>
struct Rows {
    uint4 gradient[COUNT], more[COUNT], x[COUNT], result[COUNT];
    __device__ void load_x(const uint4* from, const Place& place, int row, int rows, int vectors) {
        load<COUNT>(x, from, place, row, rows, vectors);
    }
    __device__ void load_others(
        const uint4* from, const uint4* other, const uint4* results, const Place& place, int row, int rows,
        int vectors) {
        load<COUNT>(gradient, from, place, row, rows, vectors);
        if (SUM) load<COUNT>(more, other, place, row, rows, vectors);
        if (MASK == RESULT) load<COUNT>(result, results, place, row, rows, vectors);
    }
    // The numbers of one row, and its gradient before the ReLU.
    __device__ void take(int k, float* g, float* v, const Normal& normal) const {
        float m[V], r[V];
        T::unpack(gradient[k], g);
        if (SUM) {
            T::unpack(more[k], m);
#pragma unroll
            for (int i = 0; i < V; i++) g[i] = T::rounded(g[i] + m[i]);
        }
        T::unpack(x[k], v);
        if (MASK == RESULT) T::unpack(result[k], r);
        mask<MASK>(g, v, r, normal);
    }
};

// Gradients of weight and bias; and, if "kept" is given, the gradient before the ReLU. SUM: the gradient is a sum of two.
template <Mask MASK, bool KEEP, bool SUM>
__device__ void reduce(
    const uint4* gradient, const uint4* more, const uint4* x, const uint4* result, uint4* kept, const float* mean,
    const float* rstd, const float* weight, const float* bias, float* partial, float* for_weight,
    float* for_bias, unsigned int* tickets, int rows, int vectors) {
    constexpr int AT_ONCE = 2;
    __shared__ Sums sums;
    Place place(vectors);
    float sum[V] = {}, product[V] = {};
    let_next_begin();
    if (place.inside) {
        Rows<MASK, SUM, AT_ONCE> now, next;
        int row = place.row, step = AT_ONCE * place.stride;
        now.load_x(x, place, row, rows, vectors);
        now.load_others(gradient, more, result, place, row, rows, vectors);
        Normal normal(weight, bias, place.column);
        normal.take(mean, rstd, place.column);
        for (; row < rows; row += step, now = next) {
            next.load_x(x, place, row + step, rows, vectors);
            next.load_others(gradient, more, result, place, row + step, rows, vectors);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                int at = row + k * place.stride;
                if (at >= rows) continue;
                float g[V], v[V];
                now.take(k, g, v, normal);
                if (KEEP) kept[(size_t)at * vectors + place.column] = T::packed(g);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    sum[i] += g[i];
                    product[i] += g[i] * (v[i] - normal.mean[i]);
                }
            }
        }
    }
    add_up_block(sums, sum, product, partial);
    if (!is_last(tickets)) return;
    add_up_blocks(sums, partial);
    int first = blockIdx.y * blockDim.x * V, channels = blockDim.x * V;
    for (int which = thread_number(); which < channels; which += blockDim.x * blockDim.y)
        if (first + which < vectors * V) {
            for_bias[first + which] = sums.all[which];
            for_weight[first + which] = sums.all[channels + which] * rstd[first + which];
        }
}

#define REDUCE(name, MASK, KEEP, SUM)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                \
        const uint4* gradient, const uint4* more, const uint4* x, const uint4* result, uint4* kept,            \
        const float* mean, const float* rstd, const float* weight, const float* bias, float* partial,     \
        float* for_weight, float* for_bias, unsigned int* tickets, int rows, int vectors) {                    \
        reduce<MASK, KEEP, SUM>(                                                                               \
            gradient, more, x, result, kept, mean, rstd, weight, bias, partial, for_weight, for_bias,     \
            tickets, rows, vectors);                                                                           \
    }
REDUCE(reduce_all, ALL, false, false)
REDUCE(reduce_again, AGAIN, false, false)
REDUCE(reduce_result, RESULT, false, false)
REDUCE(reduce_again_keep, AGAIN, true, false)
REDUCE(reduce_result_keep, RESULT, true, false)
REDUCE(reduce_again_keep_sum, AGAIN, true, true)
REDUCE(reduce_result_keep_sum, RESULT, true, true)

// The gradient of the input, once those of weight and bias are known. The previous kernel read the rows from first to
// last, and the last rows are still in the cache: so they come first.
template <Mask MASK>
__device__ void backward(
    uint4* for_x, const uint4* gradient, const uint4* x, const uint4* result, const float* mean,
    const float* rstd, const float* weight, const float* bias, const float* for_weight, const float* for_bias,
    int rows, int vectors) {
    constexpr int AT_ONCE = 2;
    Place place(vectors);
    if (!place.inside || place.row >= rows) return;
    Rows<MASK, false, AT_ONCE> now, next;
    int step = AT_ONCE * place.stride, row = place.row + (rows - 1 - place.row) / step * step;
    now.load_x(x, place, row, rows, vectors);
    Normal normal(weight, bias, place.column);
    normal.take(mean, rstd, place.column);
    wait_for_last();
    now.load_others(gradient, nullptr, result, place, row, rows, vectors);
    float share[V], slope[V];  // the parts of each gradient that go into the mean and into the rstd
    load_channels(for_bias, place.column, share, 0.f);
    load_channels(for_weight, place.column, slope, 0.f);
#pragma unroll
    for (int i = 0; i < V; i++) share[i] /= rows, slope[i] *= normal.rstd[i] / rows;
    for (; row >= 0; row -= step, now = next) {
        if (row >= step) {
            next.load_x(x, place, row - step, rows, vectors);
            next.load_others(gradient, nullptr, result, place, row - step, rows, vectors);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            int at = row + k * place.stride;
            if (at >= rows) continue;
            float g[V], v[V];
            now.take(k, g, v, normal);
#pragma unroll
            for (int i = 0; i < V; i++)
                g[i] = (g[i] - share[i] - (v[i] - normal.mean[i]) * slope[i]) * (normal.rstd[i] * normal.weight[i]);
            for_x[(size_t)at * vectors + place.column] = T::packed(g);
        }
    }
}

#define BACKWARD(name, MASK)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) name(                                                \
        uint4* for_x, const uint4* gradient, const uint4* x, const uint4* result, const float* mean,           \
        const float* rstd, const float* weight, const float* bias, const float* for_weight,               \
        const float* for_bias, int rows, int vectors) {                                                        \
        backward<MASK>(                                                                                        \
            for_x, gradient, x, result, mean, rstd, weight, bias, for_weight, for_bias, rows, vectors);   \
    }
BACKWARD(backward_all, ALL)
BACKWARD(backward_again, AGAIN)
BACKWARD(backward_result, RESULT)

// The sum of each channel over all rows: the gradient of a bias.
extern "C" __global__ void __launch_bounds__(THREADS) channel_sums(
    const uint4* x, void* result, float* partial, unsigned int* tickets, int rows, int vectors) {
    constexpr int AT_ONCE = 4;
    __shared__ Sums sums;
    Place place(vectors);
    float sum[V] = {}, nothing[V] = {};
    for (int row = place.row; place.inside && row < rows; row += AT_ONCE * place.stride) {
        uint4 bits[AT_ONCE];
        load<AT_ONCE>(bits, x, place, row, rows, vectors);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (row + k * place.stride >= rows) continue;
            float v[V];
            T::unpack(bits[k], v);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += v[i];
        }
    }
    add_up_block(sums, sum, nothing, partial);
    if (!is_last(tickets)) return;
    add_up_blocks(sums, partial);
    int first = blockIdx.y * blockDim.x * V;
    for (int which = thread_number(); which < blockDim.x * V; which += blockDim.x * blockDim.y)
        if (first + which < vectors * V) T::store(result, first + which, sums.all[which]);
}
