// SwiGLU of H [rows, 2 width], in which the gate and up columns of each feature are adjacent.
#include "common.cuh"

// out = silu(a) b for each pair (a, b), with silu(a) = a s and s = 1 / (1 + exp(-a)). h is
// overwritten with the derivatives b s (1 + a (1 - s)) and silu(a). Each block processes one row.
// Launch: block_per_row; reads and writes h
template <typename T>
__global__ void __launch_bounds__(256) swiglu(T* h, T* out, int width)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x;
    h += 2 * row * width, out += row * width;
    packs_of_row<N>(width, aligned(h, out), [&](int c, auto pack) {
        auto low = pack.load(h + 2 * c), high = pack.load(h + 2 * c + pack.size);
        auto y = pack.zeros();
#pragma unroll
        for (int i = 0; i < pack.size; i++) {
            float& a = 2 * i < pack.size ? low[2 * i] : high[2 * i - pack.size];
            float& b = 2 * i + 1 < pack.size ? low[2 * i + 1] : high[2 * i + 1 - pack.size];
            const float s = 1 / (1 + expf(-a)), silu = a * s;
            y[i] = silu * b;
            a = b * s * (1 + a * (1 - s));
            b = silu;
        }
        pack.store(out + c, y);
        pack.store(h + 2 * c, low);
        pack.store(h + 2 * c + pack.size, high);
    });
}

// dh = slopes dg; the result overwrites `slopes`.
// Launch: block_per_row; reads and writes slopes
template <typename T>
__global__ void __launch_bounds__(256) swiglu_grad(T* slopes, const T* dg, int width)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x;
    slopes += 2 * row * width, dg += row * width;
    packs_of_row<N>(width, aligned(slopes, dg), [&](int c, auto pack) {
        auto low = pack.load(slopes + 2 * c), high = pack.load(slopes + 2 * c + pack.size);
        const auto d = pack.load(dg + c);
#pragma unroll
        for (int i = 0; i < 2 * pack.size; i++)
            (i < pack.size ? low[i] : high[i - pack.size]) *= d[i / 2];
        pack.store(slopes + 2 * c, low);
        pack.store(slopes + 2 * c + pack.size, high);
    });
}
