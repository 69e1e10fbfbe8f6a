// SwiGLU and GeGLU of H [rows, 2 width], in which the gate and up columns of each feature are
// adjacent.
#include "gelu.cuh"

// out = x s with s = 1 / (1 + exp(-x)), and d out / dx = s (1 + x (1 - s)).
struct Silu {
    static __device__ float of(float x, float& slope)
    {
        const float s = 1 / (1 + expf(-x));
        slope = s * (1 + x * (1 - s));
        return x * s;
    }
};

// out = f(a) b for each pair (a, b). h is overwritten with the derivatives b f'(a) and f(a).
template <typename Gate, typename T>
__device__ void row_gated(T* h, T* out, int width)
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
            float slope;
            const float gate = Gate::of(a, slope);
            y[i] = gate * b;
            a = b * slope;
            b = gate;
        }
        pack.store(out + c, y);
        pack.store(h + 2 * c, low);
        pack.store(h + 2 * c + pack.size, high);
    });
}

// Each block processes one row.
// Launch: block_per_row; reads and writes h
template <typename T>
__global__ void __launch_bounds__(256) swiglu(T* h, T* out, int width)
{
    row_gated<Silu>(h, out, width);
}

// Each block processes one row.
// Launch: block_per_row; reads and writes h
template <typename T>
__global__ void __launch_bounds__(256) geglu(T* h, T* out, int width)
{
    row_gated<Tanh>(h, out, width);
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
