// LayerNorm of the rows of X [rows, columns]: y = n gamma + beta with n = (x - mean) rstd. For
// RMSNorm, mean and beta are 0, and the pointers `mean` and `beta` are null.
//
// If the columns are sharded over ranks, several kernels with communication in between are needed.
// The forward pass consists of moments, an all-gather, combine_moments and normalise (RMSNorm:
// row_squares, an all-reduce and normalise). The backward pass consists of normalise_sums, an
// all-reduce and normalise_grad. If the columns are not sharded, add_norm and norm_grad compute
// the complete passes. In both cases, norm_columns and sum_strips (rows.cu) compute the gradients
// of gamma and beta.
//
// Unless stated otherwise, each block processes one row, and each thread every blockDim-th pack of
// its columns.
#include "common.cuh"

// Return the sum of squared deviations of a row from `centre`.
template <typename T>
__device__ float squares_around(float centre, const T* x, int columns, bool wide)
{
    constexpr int N = WIDTH<T>;
    float sum = 0;
    packs_of_row<N>(columns, wide, [&](int c, auto pack) {
        const auto a = pack.load(x + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            sum += (a[i] - centre) * (a[i] - centre);
    });
    return block_sum(sum);
}

template <typename T>
__device__ float row_mean(const T* x, int columns, bool wide)
{
    constexpr int N = WIDTH<T>;
    float sum = 0;
    packs_of_row<N>(columns, wide, [&](int c, auto pack) {
        const auto a = pack.load(x + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            sum += a[i];
    });
    return block_sum(sum) / columns;
}

// result [rows]: sum of squares of each row.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256) row_squares(const T* x, float* result, int columns)
{
    const long long row = blockIdx.x;
    x += row * columns;
    const float squares = squares_around(0, x, columns, aligned(x));
    if (threadIdx.x == 0)
        result[row] = squares;
}

// result [2, rows]: mean and sum of squared deviations of each row, computed in two passes,
// because E[x^2] - E[x]^2 loses precision.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256) moments(const T* x, float* result, int columns)
{
    const long long row = blockIdx.x;
    x += row * columns;
    const float mean = row_mean(x, columns, aligned(x));
    const float squares = squares_around(mean, x, columns, aligned(x));
    if (threadIdx.x == 0) {
        result[row] = mean;
        result[gridDim.x + row] = squares;
    }
}

// Moments of complete rows, combined from those of `ranks` parts [ranks, 2, rows] with `count`
// numbers each: M2 = sum M2_i + count sum (mean_i - mean)^2 (Chan, Golub and LeVeque 1979). One
// thread per row.
// Launch: thread_per_row
__global__ void __launch_bounds__(256)
combine_moments(const float* parts, float* result, int ranks, int rows, float count)
{
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows)
        return;
    const float* mine = parts + row;
    const long long part = 2LL * rows;
    float mean = 0, squares = 0;
    for (int rank = 0; rank < ranks; rank++)
        mean += mine[rank * part];
    mean /= ranks;
    for (int rank = 0; rank < ranks; rank++) {
        const float spread = mine[rank * part] - mean;
        squares += mine[rank * part + rows] + count * spread * spread;
    }
    result[row] = mean;
    result[rows + row] = squares;
}

// n = (x - mean) rstd and y = n gamma + beta.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256) normalise(const T* x, const float* mean, const float* rstd,
                                                 const T* gamma, const T* beta, T* n, T* y,
                                                 int columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x, start = row * columns;
    const float centre = mean ? mean[row] : 0, factor = rstd[row];
    x += start, n += start, y += start;
    packs_of_row<N>(columns, aligned(x, gamma, beta, n, y), [&](int c, auto pack) {
        auto a = pack.load(x + c), b = pack.zeros();
        const auto g = pack.load(gamma + c);
        if (beta)
            b = pack.load(beta + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] = (a[i] - centre) * factor;
        pack.store(n + c, a);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] = a[i] * g[i] + b[i];
        pack.store(y + c, a);
    });
}

// s = x + r and y = norm(s), with the mean and rstd = 1 / sqrt(var + epsilon) of each row of s. If
// the residual r is null, s = x is not written.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256) add_norm(const T* x, const T* r, const T* gamma,
                                                const T* beta, T* s, T* y, float* mean,
                                                float* rstd, int columns, float epsilon)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x, start = row * columns;
    s = r ? s + start : s, r = r ? r + start : r, x += start, y += start;
    const bool wide = aligned(x, r, s, gamma, beta, y);
    if (r) {
        packs_of_row<N>(columns, wide, [&](int c, auto pack) {
            auto a = pack.load(x + c);
            const auto b = pack.load(r + c);
#pragma unroll
            for (int i = 0; i < pack.size; i++)
                a[i] += b[i];
            pack.store(s + c, a);
        });
        x = s;  // each thread reads only elements that it has written itself
    }
    const float centre = mean ? row_mean(x, columns, wide) : 0;
    const float squares = squares_around(centre, x, columns, wide);
    const float factor = 1 / sqrtf(squares / columns + epsilon);
    packs_of_row<N>(columns, wide, [&](int c, auto pack) {
        auto a = pack.load(x + c), b = pack.zeros();
        const auto g = pack.load(gamma + c);
        if (beta)
            b = pack.load(beta + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] = (a[i] - centre) * factor * g[i] + b[i];
        pack.store(y + c, a);
    });
    if (threadIdx.x == 0) {
        if (mean)
            mean[row] = centre;
        rstd[row] = factor;
    }
}

// Compute the sums of dn = dy gamma and of dn n over a row, with n = (x - mean) rstd.
template <typename T>
__device__ void row_sums(const T* x, float mean, float rstd, const T* dy, const T* gamma,
                         int columns, float& sum, float& product)
{
    constexpr int N = WIDTH<T>;
    float first = 0, second = 0;
    packs_of_row<N>(columns, aligned(x, dy, gamma), [&](int c, auto pack) {
        const auto a = pack.load(x + c), d = pack.load(dy + c), g = pack.load(gamma + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++) {
            const float dn = d[i] * g[i];
            first += dn;
            second += dn * ((a[i] - mean) * rstd);
        }
    });
    sum = block_sum(first);
    product = block_sum(second);
}

// dx = residual + rstd (dn - mean(dn) - n mean(dn n)) for a row, with n = (x - mean) factor. If
// `residual` is null, nothing is added.
template <typename T>
__device__ void row_grad(const T* x, float mean, float factor, float rstd, const T* dy,
                         const T* gamma, float mean_dn, float mean_product, const T* residual,
                         T* dx, int columns)
{
    constexpr int N = WIDTH<T>;
    packs_of_row<N>(columns, aligned(x, dy, gamma, residual, dx), [&](int c, auto pack) {
        const auto a = pack.load(x + c), d = pack.load(dy + c), g = pack.load(gamma + c);
        auto out = pack.zeros();
        if (residual)
            out = pack.load(residual + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++) {
            const float n = (a[i] - mean) * factor;
            out[i] += rstd * (d[i] * g[i] - mean_dn - n * mean_product);
        }
        pack.store(dx + c, out);
    });
}

// sums [2, rows]: the sums of dn = dy gamma and of dn n over the columns of this rank.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
normalise_sums(const T* n, const T* dy, const T* gamma, float* sums, int columns)
{
    const long long row = blockIdx.x, start = row * columns;
    float sum, product;
    row_sums(n + start, 0, 1, dy + start, gamma, columns, sum, product);
    if (threadIdx.x == 0) {
        sums[row] = sum;
        sums[gridDim.x + row] = product;
    }
}

// Compute dx from n, rstd and the means of dn and of dn n over the complete row. The gradient of
// the residual is added unless it is null. For RMSNorm, `mean_dn` is null.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
normalise_grad(const T* n, const float* rstd, const T* dy, const T* gamma, const float* mean_dn,
               const float* mean_product, const T* residual, T* dx, int columns)
{
    const long long row = blockIdx.x, start = row * columns;
    row_grad(n + start, 0, 1, rstd[row], dy + start, gamma, mean_dn ? mean_dn[row] : 0,
             mean_product[row], residual ? residual + start : residual, dx + start, columns);
}

// Compute dx from s, mean and rstd, which add_norm has saved. One block runs both passes over a
// row.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
norm_grad(const T* s, const float* mean, const float* rstd, const T* dy, const T* gamma,
          const T* residual, T* dx, int columns)
{
    const long long row = blockIdx.x, start = row * columns;
    const float centre = mean ? mean[row] : 0, factor = rstd[row];
    float sum, product;
    row_sums(s + start, centre, factor, dy + start, gamma, columns, sum, product);
    row_grad(s + start, centre, factor, factor, dy + start, gamma, mean ? sum / columns : 0,
             product / columns, residual ? residual + start : residual, dx + start, columns);
}

// First pass of dgamma = sum over rows of dy n and dbeta = sum over rows of dy (see add_eight).
// The results are written to partial [strips, 2, columns]. n = (x - mean) rstd, or n = x if rstd
// is null.
// Launch: tiles_of_strips
template <typename T>
__global__ void __launch_bounds__(256) norm_columns(const T* x, const float* mean,
                                                    const float* rstd, const T* dy,
                                                    float* partial, int rows, int columns)
{
    constexpr int N = WIDTH<T>;
    const int c = (blockIdx.x * 32 + threadIdx.x) * N;
    Pack<N> dgamma = {}, dbeta = {};
    pack_of_columns<N>(columns - c, columns % N == 0 && aligned(x, dy), [&](auto pack) {
        for (int row = blockIdx.y * 8 + threadIdx.y; row < rows; row += gridDim.y * 8) {
            const long long start = static_cast<long long>(row) * columns + c;
            const float centre = mean ? mean[row] : 0, factor = rstd ? rstd[row] : 1;
            const Pack<N> a = pack.load(x + start), d = pack.load(dy + start);
#pragma unroll
            for (int i = 0; i < N; i++) {
                dgamma[i] += d[i] * ((a[i] - centre) * factor);
                dbeta[i] += d[i];
            }
        }
    });
    float* strip = partial + 2LL * blockIdx.y * columns;
    add_eight(dgamma, strip, columns);
    add_eight(dbeta, strip + columns, columns);
}
