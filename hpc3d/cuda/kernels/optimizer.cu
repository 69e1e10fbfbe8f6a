// Optimizer updates of the flat arrays, and the sum of squares for the gradient norm.
//
// 16-bit values have a `master` copy in float, which is updated and then rounded in the same pass.
// For values in float, `master` is null. Unless stated otherwise, kernels use grid-stride loops over
// packs.
#include "common.cuh"

// AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101). The factors [scale,
// rate, root, keep] are defined in hpc3d/training/optimizers/optimizer.py:
// g = scale grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
// w = keep w - rate m / (root sqrt(v) + epsilon)
// Launch: strided; reads and writes master, first, second
template <typename T>
__global__ void __launch_bounds__(256)
adamw(T* value, float* master, const float* grad, float* first, float* second,
      const float* factors, double beta1, double beta2, float epsilon, long long size)
{
    constexpr int N = WIDTH<T>;
    const float scale = factors[0], rate = factors[1], root = factors[2], keep = factors[3];
    const float b1 = beta1, b2 = beta2, rest1 = 1 - beta1, rest2 = 1 - beta2;
    const bool wide = aligned(value, master, grad, first, second);
    packs_of_grid<N>(size, wide, [&](long long c, auto pack) {
        const auto grads = pack.load(grad + c);
        auto m = pack.load(first + c), v = pack.load(second + c);
        auto w = master ? pack.load(master + c) : pack.load(value + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++) {
            const float g = scale * grads[i];
            m[i] = b1 * m[i] + rest1 * g;
            v[i] = b2 * v[i] + rest2 * g * g;
            w[i] = keep * w[i] - rate * (m[i] / (root * sqrtf(v[i]) + epsilon));
        }
        pack.store(first + c, m);
        pack.store(second + c, v);
        pack.store(value + c, w);
        if (master)
            pack.store(master + c, w);
    });
}

// Lion: sign of an interpolated momentum (Chen et al., arXiv:2302.06675); factors = [scale, rate,
// keep]: g = scale grad; w = keep w - rate sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g
// Launch: strided; reads and writes master, momentum
template <typename T>
__global__ void __launch_bounds__(256)
lion(T* value, float* master, const float* grad, float* momentum, const float* factors,
     double beta1, double beta2, long long size)
{
    constexpr int N = WIDTH<T>;
    const float scale = factors[0], rate = factors[1], keep = factors[2];
    const float b1 = beta1, b2 = beta2, rest1 = 1 - beta1, rest2 = 1 - beta2;
    packs_of_grid<N>(size, aligned(value, master, grad, momentum), [&](long long c, auto pack) {
        const auto grads = pack.load(grad + c);
        auto m = pack.load(momentum + c);
        auto w = master ? pack.load(master + c) : pack.load(value + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++) {
            const float g = scale * grads[i], mixed = b1 * m[i] + rest1 * g;
            const float sign = mixed > 0 ? 1 : mixed < 0 ? -1 : mixed;  // 0 and NaN are kept
            w[i] = keep * w[i] - rate * sign;
            m[i] = b2 * m[i] + rest2 * g;
        }
        pack.store(momentum + c, m);
        pack.store(value + c, w);
        if (master)
            pack.store(master + c, w);
    });
}

// Return the index of the level nearest to x; ties go to the lower level. `levels` contains 256
// numbers in ascending order.
__device__ inline unsigned nearest(const float* levels, float x)
{
    unsigned low = 0;
    for (int step = 128; step > 0; step /= 2)
        low += (levels[low + step - 1] + levels[low + step]) / 2 < x ? step : 0;
    return low;
}

// Four adjacent codes, of which the first `left` exist, as one word. Aligned words are accessed at
// once, others byte by byte.
struct Codes {
    unsigned char* at;
    int left;
    bool whole;

    __device__ Codes(unsigned char* at, int left)
        : at(at), left(left), whole(left >= 4 && reinterpret_cast<size_t>(at) % 4 == 0) {}

    __device__ unsigned load() const
    {
        if (whole)
            return *reinterpret_cast<const unsigned*>(at);
        unsigned word = 0;
        for (int k = 0; k < 4 && k < left; k++)
            word |= unsigned(at[k]) << 8 * k;
        return word;
    }

    __device__ void store(unsigned word) const
    {
        if (whole)
            *reinterpret_cast<unsigned*>(at) = word;
        else
            for (int k = 0; k < 4 && k < left; k++)
                at[k] = word >> 8 * k;
    }
};

// AdamW with 8-bit moments (Dettmers et al., arXiv:2110.02861). A moment is the scale of its block
// of 256 columns times level [first, second][code]. A nonzero second moment never has code 0.
// Each thread block processes one block of moments, of which the last in a row may be shorter.
// Each thread processes four elements, whose codes form one word. Eight resident thread blocks leave 128 registers per thread; with more, the
// compiler keeps some registers in memory across divisions.
// Launch: row_of 4; reads and writes master, first, first_scales, second, second_scales
template <typename T>
__global__ void __launch_bounds__(64, 8)
adamw_8bit(T* value, float* master, const float* grad, unsigned char* first, float* first_scales,
           unsigned char* second, float* second_scales, const float* levels, const float* factors,
           double beta1, double beta2, float epsilon, int columns)
{
    const float scale = factors[0], rate = factors[1], root = factors[2], keep = factors[3];
    const float b1 = beta1, b2 = beta2, rest1 = 1 - beta1, rest2 = 1 - beta2;
    const float* unsigned_levels = levels + 256;
    const int per_row = (columns + 255) / 256;
    const int column = blockIdx.x % per_row * 256 + 4 * threadIdx.x, left = columns - column;
    const long long block = blockIdx.x, start = block / per_row * columns + column;
    const Codes codes1(first + start, left), codes2(second + start, left);
    const float scale1 = first_scales[block], scale2 = second_scales[block];
    const unsigned word1 = codes1.load(), word2 = codes2.load();
    float m[4] = {}, v[4] = {}, most1 = 0, most2 = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k >= left)
            break;
        const long long i = start + k;
        const float g = scale * grad[i];
        m[k] = b1 * (levels[word1 >> 8 * k & 255] * scale1) + rest1 * g;
        v[k] = b2 * (unsigned_levels[word2 >> 8 * k & 255] * scale2) + rest2 * g * g;
        const float w = keep * (master ? master[i] : to_float(value[i]))
            - rate * (m[k] / (root * sqrtf(v[k]) + epsilon));
        put(value[i], w);
        if (master)
            master[i] = w;
        most1 = Max::of(most1, fabsf(m[k]));
        most2 = Max::of(most2, v[k]);
    }
    most1 = block_all<Max>(most1);
    most2 = block_all<Max>(most2);
    unsigned found1 = 0, found2 = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const unsigned code = nearest(unsigned_levels, most2 > 0 ? v[k] / most2 : 0);
        found1 |= nearest(levels, most1 > 0 ? m[k] / most1 : 0) << 8 * k;
        found2 |= (code == 0 && v[k] > 0 ? 1 : code) << 8 * k;
    }
    codes1.store(found1);
    codes2.store(found2);
    if (threadIdx.x == 0) {
        first_scales[block] = most1;
        second_scales[block] = most2;
    }
}

// SGD: w = keep w - rate grad, with factors = [rate, keep].
// Launch: strided; reads and writes master
template <typename T>
__global__ void __launch_bounds__(256)
descend(T* value, float* master, const float* grad, const float* factors, long long size)
{
    constexpr int N = WIDTH<T>;
    const float rate = factors[0], keep = factors[1];
    packs_of_grid<N>(size, aligned(value, master, grad), [&](long long c, auto pack) {
        const auto g = pack.load(grad + c);
        auto w = master ? pack.load(master + c) : pack.load(value + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            w[i] = keep * w[i] - rate * g[i];
        pack.store(value + c, w);
        if (master)
            pack.store(master + c, w);
    });
}

// First pass of the sum of squares; the partial sums are written to partial [blocks].
// Launch: strided
__global__ void __launch_bounds__(256)
sum_squares(const float* grad, float* partial, long long size)
{
    constexpr int N = WIDTH<float>;
    float sum = 0;
    packs_of_grid<N>(size, aligned(grad), [&](long long c, auto pack) {
        const auto g = pack.load(grad + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            sum += g[i] * g[i];
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = sum;
}

// Second pass: total = sum of the partial sums, in double precision. If `add` is set, the sum is
// added to total. One block.
// Launch: one_block
__global__ void __launch_bounds__(1024)
sum_parts(const float* partial, double* total, int parts, int add)
{
    double sum = 0;
    for (int part = threadIdx.x; part < parts; part += blockDim.x)
        sum += partial[part];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        *total = add ? *total + sum : sum;
}
