// Group normalisation fused with the activation that follows it, for channels_last images.
//
// A sample is a matrix: one row for each place of the image, one column for each channel. A group is some neighbouring
// columns of one sample. Sixteen bytes, a "vector" of 8 neighbouring channels, are read at a time. A block of threads is
// a rectangle of vectors; blockIdx.y is the sample, and the blocks of a sample go down its rows in turns:
//
//     sample 0   rows 0-15  (0,0)     16-31  (1,0)     32-47  (0,0)  again the first
//     sample 1   rows 0-15  (0,1)     16-31  (1,1)     ...
//
// Sums are kept for each channel, so that any number of channels can be a group: per thread, then per block ("partial":
// sample x block x 2 x channel). Then one block per sample adds them up over blocks, and each of its warps over a group.
// The order of the additions is always the same, so the results are the same to the bit.
//
// NUMBER is defined when this is compiled: Half or BFloat.

#include "numbers.cuh"

typedef NUMBER T;
constexpr int V = T::count;
constexpr int THREADS = 256;         // of a block
constexpr int MOST_CHANNELS = 4096;  // of a sample
constexpr int AHEAD = 4;             // rows of a thread that are read at once

constexpr int WARP = 32;

enum Activation { NONE, RELU, SILU };

__device__ float sigmoid(float value) { return 1.0f / (1.0f + __expf(-value)); }

__device__ float activated(float y, int activation) {
    if (activation == RELU) return y > 0.0f ? y : 0.0f;
    return activation == SILU ? y * sigmoid(y) : y;
}

// The gradient before the activation, from the gradient after it.
__device__ float past(float gradient, float y, int activation) {
    if (activation == RELU) return y > 0.0f ? gradient : 0.0f;
    if (activation == NONE) return gradient;
    float s = sigmoid(y);
    return gradient * s * (1.0f + y * (1.0f - s));
}

// A thread's parameters of its channels: for (x - mean) * rstd, and that times weight plus bias.
struct Channels {
    float scale[V], middle[V], by[V], plus[V];
    __device__ Channels(const float* mean, const float* rstd, const float* weight, const float* bias, int column,
                        int vectors, int groups) {
        int size = vectors * V / groups;
#pragma unroll
        for (int i = 0; i < V; i++) {
            int channel = column * V + i, group = blockIdx.y * groups + channel / size;
            scale[i] = rstd[group], middle[i] = mean[group];
            by[i] = scale[i] * (weight ? weight[channel] : 1.0f);
            plus[i] = (bias ? bias[channel] : 0.0f) - middle[i] * by[i];
        }
    }
    __device__ float normal(float x, int i) const { return (x - middle[i]) * scale[i]; }
    __device__ float value(float x, int i) const { return x * by[i] + plus[i]; }
};

__device__ void load(uint4* bits, const uint4* sample, int row, int stride, int rows, int vectors, int column) {
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
        int at = row + k * stride;
        if (at < rows) bits[k] = sample[(size_t)at * vectors + column];
    }
}

// Numbers of one vector, in 16 bits or as float.
__device__ void store(void* to, size_t at, const float* values, int wide) {
    uint4* place = (uint4*)to;
    if (!wide) {
        place[at] = T::packed(values);
    } else {
        place[2 * at] = Float::packed(values);
        place[2 * at + 1] = Float::packed(values + 4);
    }
}

// Adds up the sums of all threads of a column, and writes them as this block's sums.
__device__ void write_partial(const float* sums, float* partial, int column, int vectors) {
    __shared__ float all[THREADS * 2 * V];
    int thread = threadIdx.y * blockDim.x + threadIdx.x, channels = vectors * V;
    __syncthreads();  // the last column's sums have been read
#pragma unroll
    for (int i = 0; i < 2 * V; i++) all[i * THREADS + thread] = sums[i];
    __syncthreads();
    if (column >= vectors) return;
    float* of_block = partial + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * 2 * channels;
    for (int i = threadIdx.y; i < 2 * V; i += blockDim.y) {
        float total = 0.0f;
        for (int row = 0; row < blockDim.y; row++) total += all[i * THREADS + row * blockDim.x + threadIdx.x];
        of_block[i / V * channels + column * V + i % V] = total;
    }
}

// The sum of a number over the threads of a warp; every thread gets it.
__device__ float over_warp(float value) {
#pragma unroll
    for (int apart = WARP / 2; apart; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
    return value;
}

// Sums of x minus the first row, and of its square, for each channel: numbers far from zero keep their digits.
extern "C" __global__ void sums(const uint4* x, float* partial, int rows, int vectors) {
    const uint4* sample = x + (size_t)blockIdx.y * rows * vectors;
    int first = blockIdx.x * blockDim.y + threadIdx.y, stride = gridDim.x * blockDim.y;
    for (int begin = 0; begin < vectors; begin += blockDim.x) {
        int column = begin + threadIdx.x;
        float total[2 * V] = {}, start[V];
        if (column < vectors) {
            T::unpack(sample[column], start);
            for (int row = first; row < rows; row += AHEAD * stride) {
                uint4 bits[AHEAD];
                load(bits, sample, row, stride, rows, vectors, column);
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                    if (row + k * stride >= rows) break;
                    float v[V];
                    T::unpack(bits[k], v);
#pragma unroll
                    for (int i = 0; i < V; i++) {
                        float apart = v[i] - start[i];
                        total[i] += apart, total[V + i] += apart * apart;
                    }
                }
            }
        }
        write_partial(total, partial, column, vectors);
    }
}

// Mean and rstd (one over the standard deviation) of each group of a sample.
extern "C" __global__ void statistics(const uint4* x, const float* partial, float* mean, float* rstd, int parts,
                                      int rows, int vectors, int groups, float epsilon) {
    __shared__ float means[MOST_CHANNELS], squares[MOST_CHANNELS];
    int channels = vectors * V, size = channels / groups;
    const uint4* sample = x + (size_t)blockIdx.y * rows * vectors;
    const float* of_parts = partial + (size_t)blockIdx.y * parts * 2 * channels;
    for (int channel = threadIdx.x; channel < channels; channel += blockDim.x) {
        float sum = 0.0f, square = 0.0f;
        for (int part = 0; part < parts; part++) {
            sum += of_parts[part * 2 * channels + channel];
            square += of_parts[(part * 2 + 1) * channels + channel];
        }
        means[channel] = T::load(sample, channel) + sum / rows;
        squares[channel] = square - sum * sum / rows;
    }
    __syncthreads();
    for (int group = threadIdx.x / WARP; group < groups; group += blockDim.x / WARP) {
        float middle = 0.0f, square = 0.0f;
        for (int i = threadIdx.x % WARP; i < size; i += WARP) middle += means[group * size + i];
        middle = over_warp(middle) / size;
        for (int i = threadIdx.x % WARP; i < size; i += WARP) {
            float apart = means[group * size + i] - middle;
            square += squares[group * size + i] + rows * apart * apart;
        }
        float variance = over_warp(square) / ((float)rows * size);
        if (threadIdx.x % WARP == 0) {
            mean[blockIdx.y * groups + group] = middle;
            rstd[blockIdx.y * groups + group] = rsqrtf((variance > 0.0f ? variance : 0.0f) + epsilon);
        }
    }
}

extern "C" __global__ void apply(void* y, const uint4* x, const float* mean, const float* rstd,
                                 const float* weight, const float* bias, int activation, int wide, int rows,
                                 int vectors, int groups) {
    size_t before = (size_t)blockIdx.y * rows * vectors;
    int first = blockIdx.x * blockDim.y + threadIdx.y, stride = gridDim.x * blockDim.y;
    for (int column = threadIdx.x; column < vectors; column += blockDim.x) {
        Channels channels(mean, rstd, weight, bias, column, vectors, groups);
        for (int row = first; row < rows; row += AHEAD * stride) {
            uint4 bits[AHEAD];
            load(bits, x + before, row, stride, rows, vectors, column);
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                int at = row + k * stride;
                if (at >= rows) break;
                float v[V];
                T::unpack(bits[k], v);
#pragma unroll
                for (int i = 0; i < V; i++) v[i] = activated(channels.value(v[i], i), activation);
                store(y, before + (size_t)at * vectors + column, v, wide);
            }
        }
    }
}

// Sums of the gradient before the activation, and of that times the normalised input, for each channel.
extern "C" __global__ void gradient_sums(const uint4* gradient, const uint4* x, const float* mean,
                                         const float* rstd, const float* weight, const float* bias,
                                         float* partial, int activation, int rows, int vectors, int groups) {
    size_t before = (size_t)blockIdx.y * rows * vectors;
    int first = blockIdx.x * blockDim.y + threadIdx.y, stride = gridDim.x * blockDim.y;
    for (int begin = 0; begin < vectors; begin += blockDim.x) {
        int column = begin + threadIdx.x;
        float total[2 * V] = {};
        if (column < vectors) {
            Channels channels(mean, rstd, weight, bias, column, vectors, groups);
            for (int row = first; row < rows; row += AHEAD * stride) {
                uint4 bits[AHEAD], gradients[AHEAD];
                load(bits, x + before, row, stride, rows, vectors, column);
                load(gradients, gradient + before, row, stride, rows, vectors, column);
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                    if (row + k * stride >= rows) break;
                    float v[V], g[V];
                    T::unpack(bits[k], v);
                    T::unpack(gradients[k], g);
#pragma unroll
                    for (int i = 0; i < V; i++) {
                        float inner = past(g[i], channels.value(v[i], i), activation);
                        total[i] += inner, total[V + i] += inner * channels.normal(v[i], i);
                    }
                }
            }
        }
        write_partial(total, partial, column, vectors);
    }
}

// For each sample, these sums over all blocks ("of_sample": sample x 2 x channel), and their means over each group.
extern "C" __global__ void coefficients(const float* partial, const float* weight, float* of_sample, float* means,
                                        int parts, int rows, int vectors, int groups) {
    __shared__ float plain[MOST_CHANNELS], normal[MOST_CHANNELS];
    int channels = vectors * V, size = channels / groups;
    const float* of_parts = partial + (size_t)blockIdx.y * parts * 2 * channels;
    for (int channel = threadIdx.x; channel < channels; channel += blockDim.x) {
        float sum = 0.0f, product = 0.0f;
        for (int part = 0; part < parts; part++) {
            sum += of_parts[part * 2 * channels + channel];
            product += of_parts[(part * 2 + 1) * channels + channel];
        }
        of_sample[(size_t)blockIdx.y * 2 * channels + channel] = sum;
        of_sample[((size_t)blockIdx.y * 2 + 1) * channels + channel] = product;
        float by = weight ? weight[channel] : 1.0f;
        plain[channel] = sum * by, normal[channel] = product * by;
    }
    __syncthreads();
    for (int group = threadIdx.x / WARP; group < groups; group += blockDim.x / WARP) {
        float sum = 0.0f, product = 0.0f, count = (float)rows * size;
        for (int i = threadIdx.x % WARP; i < size; i += WARP)
            sum += plain[group * size + i], product += normal[group * size + i];
        sum = over_warp(sum), product = over_warp(product);
        if (threadIdx.x % WARP == 0) {
            means[(blockIdx.y * groups + group) * 2] = sum / count;
            means[(blockIdx.y * groups + group) * 2 + 1] = product / count;
        }
    }
}

extern "C" __global__ void input_gradient(void* result, const uint4* gradient, const uint4* x, const float* mean,
                                          const float* rstd, const float* weight, const float* bias,
                                          const float* means, int activation, int wide, int rows, int vectors,
                                          int groups) {
    size_t before = (size_t)blockIdx.y * rows * vectors;
    int first = blockIdx.x * blockDim.y + threadIdx.y, stride = gridDim.x * blockDim.y;
    int size = vectors * V / groups;
    for (int column = threadIdx.x; column < vectors; column += blockDim.x) {
        Channels channels(mean, rstd, weight, bias, column, vectors, groups);
        float plain[V], normal[V];
#pragma unroll
        for (int i = 0; i < V; i++) {
            int group = blockIdx.y * groups + (column * V + i) / size;
            plain[i] = means[2 * group] * channels.scale[i], normal[i] = means[2 * group + 1] * channels.scale[i];
        }
        for (int row = first; row < rows; row += AHEAD * stride) {
            uint4 bits[AHEAD], gradients[AHEAD];
            load(bits, x + before, row, stride, rows, vectors, column);
            load(gradients, gradient + before, row, stride, rows, vectors, column);
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                int at = row + k * stride;
                if (at >= rows) break;
                float v[V], g[V];
                T::unpack(bits[k], v);
                T::unpack(gradients[k], g);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    float inner = past(g[i], channels.value(v[i], i), activation);
                    g[i] = channels.by[i] * inner - plain[i] - channels.normal(v[i], i) * normal[i];
                }
                store(result, before + (size_t)at * vectors + column, g, wide);
            }
        }
    }
}
