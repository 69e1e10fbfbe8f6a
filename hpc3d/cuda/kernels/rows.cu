// Sums of matrices and of their rows: biases, residuals, gradients.
#include "common.cuh"

// out = y + bias, with one bias per column. Each block processes one row.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256) add_bias(const T* y, const T* bias, T* out, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long start = static_cast<long long>(blockIdx.x) * columns;
    y += start, out += start;
    packs_of_row<N>(columns, aligned(y, bias, out), [&](int c, auto pack) {
        auto a = pack.load(y + c);
        const auto b = pack.load(bias + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] += b[i];
        pack.store(out + c, a);
    });
}

// out = x + y for `size` elements. A grid-stride loop over packs.
// Launch: strided
template <typename T>
__global__ void __launch_bounds__(256) add(const T* x, const T* y, T* out, long long size)
{
    constexpr int N = WIDTH<T>;
    packs_of_grid<N>(size, aligned(x, y, out), [&](long long c, auto pack) {
        auto a = pack.load(x + c);
        const auto b = pack.load(y + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] += b[i];
        pack.store(out + c, a);
    });
}

// out = factor x + offset for `size` elements; out may be x. A grid-stride loop over packs.
// Launch: strided
template <typename T>
__global__ void __launch_bounds__(256)
scale_and_shift(const T* x, T* out, float factor, float offset, long long size)
{
    constexpr int N = WIDTH<T>;
    packs_of_grid<N>(size, aligned(x, out), [&](long long c, auto pack) {
        auto a = pack.load(x + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] = factor * a[i] + offset;
        pack.store(out + c, a);
    });
}

// x = cap tanh(x / cap) for `size` elements. A grid-stride loop over packs.
// Launch: strided; reads and writes x
template <typename T>
__global__ void __launch_bounds__(256) soft_cap(T* x, float cap, long long size)
{
    constexpr int N = WIDTH<T>;
    packs_of_grid<N>(size, aligned(x), [&](long long c, auto pack) {
        auto a = pack.load(x + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] = cap * tanhf(a[i] / cap);
        pack.store(x + c, a);
    });
}

// dy *= 1 - (y / cap)^2 for `size` elements, with the result y of soft_cap. A grid-stride loop over
// packs.
// Launch: strided; reads and writes dy
template <typename T>
__global__ void __launch_bounds__(256)
soft_cap_grad(T* dy, const T* y, float cap, long long size)
{
    constexpr int N = WIDTH<T>;
    packs_of_grid<N>(size, aligned(dy, y), [&](long long c, auto pack) {
        auto d = pack.load(dy + c);
        const auto a = pack.load(y + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            d[i] *= 1 - a[i] / cap * (a[i] / cap);
        pack.store(dy + c, d);
    });
}

// grad += dw; gradients are accumulated over microbatches in float. A grid-stride loop over packs.
// Launch: strided; reads and writes grad
template <typename T>
__global__ void __launch_bounds__(256) accumulate(float* grad, const T* dw, long long size)
{
    constexpr int N = WIDTH<T>;
    packs_of_grid<N>(size, aligned(grad, dw), [&](long long c, auto pack) {
        auto sum = pack.load(grad + c);
        const auto a = pack.load(dw + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            sum[i] += a[i];
        pack.store(grad + c, sum);
    });
}

// grad += dw for `columns` columns of grad [rows, grad_columns] and dw [rows, dw_columns],
// starting at columns grad_first and dw_first. Each block processes one row.
// Launch: block_per_row; reads and writes grad
template <typename T>
__global__ void __launch_bounds__(256)
accumulate_columns(float* grad, const T* dw, int columns, int grad_first, int grad_columns,
                   int dw_first, int dw_columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x;
    grad += row * grad_columns + grad_first, dw += row * dw_columns + dw_first;
    packs_of_row<N>(columns, aligned(grad, dw), [&](int c, auto pack) {
        auto sum = pack.load(grad + c);
        const auto a = pack.load(dw + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            sum[i] += a[i];
        pack.store(grad + c, sum);
    });
}

// First pass of the sum over rows, which is the gradient of a bias; writes partial [strips,
// columns].
// Launch: tiles_of_strips
template <typename T>
__global__ void __launch_bounds__(256)
sum_rows(const T* y, float* partial, int rows, int columns)
{
    constexpr int N = WIDTH<T>;
    const int c = (blockIdx.x * 32 + threadIdx.x) * N;
    Pack<N> sum = {};
    pack_of_columns<N>(columns - c, columns % N == 0 && aligned(y), [&](auto pack) {
        for (int row = blockIdx.y * 8 + threadIdx.y; row < rows; row += gridDim.y * 8) {
            const Pack<N> a = pack.load(y + static_cast<long long>(row) * columns + c);
#pragma unroll
            for (int i = 0; i < N; i++)
                sum[i] += a[i];
        }
    });
    add_eight(sum, partial + static_cast<long long>(blockIdx.y) * columns, columns);
}

// Second pass: total = sum of the strips. If `add` is set, the sum is added to total. A strip has
// the shape [columns], or [2, columns] if the grid has a second row, whose sums are written to
// `other`. Thread (x, y) of a block of 32 x 8 threads sums every eighth strip of a column.
// Launch: tiles_of_columns
__global__ void __launch_bounds__(256)
sum_strips(const float* partial, float* total, float* other, int strips, int columns, int add)
{
    const int column = blockIdx.x * 32 + threadIdx.x;
    const long long stride = static_cast<long long>(gridDim.y) * columns;
    float* to = blockIdx.y == 0 ? total : other;
    partial += blockIdx.y * columns;
    Pack<1> sum = {};
    if (column < columns) {
        sum[0] = add && threadIdx.y == 0 ? to[column] : 0;
#pragma unroll 4
        for (int strip = threadIdx.y; strip < strips; strip += 8)
            sum[0] += partial[strip * stride + column];
    }
    add_eight(sum, to, columns);
}
