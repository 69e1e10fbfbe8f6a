// Updates of the flat arrays, and the sum of squares for the global norm.
//
// Values of 16 bits have a `master` copy in float, which is updated and then rounded in the same
// pass; values in float have none, and master is null.  The grid strides over packs.
#include "common.cuh"

// Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101); factors = [scale, rate, root,
// keep] as hpc3d.training.optimizer has them:
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

// Sign of an interpolation (Chen et al., arXiv:2302.06675); factors = [scale, rate, keep]:
// g = scale grad;  w = keep w - rate sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g
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
            const float sign = mixed > 0 ? 1 : mixed < 0 ? -1 : mixed;  // 0 or NaN stays
            w[i] = keep * w[i] - rate * sign;
            m[i] = b2 * m[i] + rest2 * g;
        }
        pack.store(momentum + c, m);
        pack.store(value + c, w);
        if (master)
            pack.store(master + c, w);
    });
}

// w = keep w - rate grad, factors = [rate, keep].
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

// The sum of squares, first pass: partial [blocks].
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

// Second pass: total = the sum of the parts, or total += it, in double.  One block.
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
