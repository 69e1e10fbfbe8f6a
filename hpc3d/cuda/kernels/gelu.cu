// GELU of h + bias [rows, columns] and its derivative. The forward pass computes the derivative,
// so that the backward pass is a single multiplication. Each block processes one row. `bias` may
// be null.
#include "gelu.cuh"

// out = x Phi(x) and d out / dx = Phi(x) + x phi(x), with the CDF Phi and the density phi of the
// standard normal distribution.
struct Exact {
    static __device__ float of(float x, float& slope)
    {
        const float phi = 0.5f * (1 + erff(x * 0.7071067811865476f));
        slope = phi + x * 0.3989422804014327f * expf(-0.5f * x * x);
        return x * phi;
    }
};

// Compute one row of the output, and overwrite h with the derivative.
template <typename Gelu, typename T>
__device__ void row_gelu(T* h, const T* bias, T* out, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long start = static_cast<long long>(blockIdx.x) * columns;
    h += start, out += start;
    packs_of_row<N>(columns, aligned(h, bias, out), [&](int c, auto pack) {
        auto x = pack.load(h + c), y = pack.zeros();
        if (bias)
            y = pack.load(bias + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            y[i] = Gelu::of(x[i] + y[i], x[i]);
        pack.store(out + c, y);
        pack.store(h + c, x);
    });
}

// Launch: block_per_row; reads and writes h
template <typename T>
__global__ void __launch_bounds__(256) gelu_tanh(T* h, const T* bias, T* out, int columns)
{
    row_gelu<Tanh>(h, bias, out, columns);
}

// Launch: block_per_row; reads and writes h
template <typename T>
__global__ void __launch_bounds__(256) gelu_exact(T* h, const T* bias, T* out, int columns)
{
    row_gelu<Exact>(h, bias, out, columns);
}

// dh = slope dg for `size` elements; the result overwrites `slope`. A grid-stride loop over packs.
// Launch: strided; reads and writes slope
template <typename T>
__global__ void __launch_bounds__(256) gelu_grad(T* slope, const T* dg, long long size)
{
    constexpr int N = WIDTH<T>;
    packs_of_grid<N>(size, aligned(slope, dg), [&](long long c, auto pack) {
        auto a = pack.load(slope + c);
        const auto d = pack.load(dg + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] *= d[i];
        pack.store(slope + c, a);
    });
}
