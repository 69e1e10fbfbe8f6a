// Float8 by tiles and by rows (hpc3d/ops/float8.py and row_codes.py).
#include "common.cuh"

// The nearest number with so many binary `digits` behind the first one, ties to even; the steps
// grow no smaller than those from 2^lowest on, and what is beyond `most` is `most`.
__device__ inline float nearest(float x, float most, int digits, int lowest)
{
    if (isnan(x))
        return x;
    x = fminf(fmaxf(x, -most), most);
    int exponent;
    frexpf(x, &exponent);
    const float step = ldexpf(1, max(exponent - 1, lowest) - digits);
    return rintf(x / step) * step;
}

__device__ inline float divisor(float largest, float most)
{
    const float scale = largest / most;
    return scale == 0 ? 1 : scale;
}

// maxima [rows, across] = max |x| of each row over its part of each tile of `width` columns, the
// first of which begins `left` columns before x.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
tile_row_maxima(const T* x, float* maxima, int columns, int width, int left, int across)
{
    x += static_cast<long long>(blockIdx.x) * columns;
    maxima += static_cast<long long>(blockIdx.x) * across;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (across == 1) {
        float most = 0;
        for (int c = threadIdx.x; c < columns; c += blockDim.x)
            most = Max::of(most, fabsf(to_float(x[c])));
        most = block_all<Max>(most);
        if (threadIdx.x == 0)
            *maxima = most;
        return;
    }
    for (int tile = warp; tile < across; tile += warps) {
        const int begin = max(0, tile * width - left);
        const int end = min(columns, (tile + 1) * width - left);
        float most = 0;
        for (int c = begin + lane; c < end; c += 32)
            most = Max::of(most, fabsf(to_float(x[c])));
        most = warp_all<Max>(most);
        if (lane == 0)
            maxima[tile] = most;
    }
}

// maxima [down, columns] = the maxima of `partial` [rows, columns] over tiles of `height` rows, the
// first of which begins `top` rows before it.
// Launch: block_per_row
__global__ void __launch_bounds__(256)
tile_column_maxima(
    const float* partial, float* maxima, int rows, int columns, int height, int top)
{
    const int tile = blockIdx.x / columns, column = blockIdx.x % columns;
    const int begin = max(0, tile * height - top);
    const int end = min(rows, (tile + 1) * height - top);
    float most = 0;
    for (int r = begin + threadIdx.x; r < end; r += blockDim.x)
        most = Max::of(most, partial[static_cast<long long>(r) * columns + column]);
    most = block_all<Max>(most);
    if (threadIdx.x == 0)
        maxima[blockIdx.x] = most;
}

// out = s round(x / s), s = maxima / most: rows [m, experts] of x, maxima [down, experts, across].
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
round_tiles(
    const T* x, const float* maxima, T* out, int columns, int experts, int height, int top,
    int width, int left, int across, float most, int digits, int lowest)
{
    const long long row = blockIdx.x;
    const long long tile = (row / experts + top) / height * experts + row % experts;
    x += row * columns, out += row * columns, maxima += tile * across;
    constexpr int N = WIDTH<T>;
    packs_of_row<N>(columns, aligned(x, out) && columns % N == 0, [&](int c, auto pack) {
        auto a = pack.load(x + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++) {
            const float scale = divisor(maxima[(left + c + i) / width], most);
            a[i] = nearest(a[i] / scale, most, digits, lowest) * scale;
        }
        pack.store(out + c, a);
    });
}

// The bits of a number of e4m3fn.
__device__ inline unsigned char bits_of(float number)
{
    if (isnan(number))
        return 0x7f;
    const int sign = signbit(number) ? 0x80 : 0;
    number = fabsf(number);
    if (number < 0.015625f)  // 2^-6: below it steps of 2^-9
        return sign | static_cast<int>(number * 512);
    int exponent;
    const float part = frexpf(number, &exponent);  // from 1/2 on
    return sign | (exponent + 6) << 3 | (static_cast<int>(part * 16) - 8);
}

__device__ inline float number_of(unsigned char bits)
{
    const int exponent = bits >> 3 & 15, digits = bits & 7;
    if ((bits & 0x7f) == 0x7f)
        return __int_as_float(0x7fc00000);
    const float number = exponent ? ldexpf(8 + digits, exponent - 10) : ldexpf(digits, -9);
    return bits & 0x80 ? -number : number;
}

// codes = round(x / scale) in e4m3fn, scales [rows] = max |x| / 448.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
encode_float8_rows(const T* x, unsigned char* codes, float* scales, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x;
    x += row * columns, codes += row * columns;
    const bool wide = aligned(x) && columns % N == 0;
    float largest = 0;
    packs_of_row<N>(columns, wide, [&](int c, auto pack) {
        const auto a = pack.load(x + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            largest = Max::of(largest, fabsf(a[i]));
    });
    largest = block_all<Max>(largest);
    const float scale = largest / 448, by = scale > 0 ? scale : 1;
    packs_of_row<N>(columns, wide, [&](int c, auto pack) {
        const auto a = pack.load(x + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            codes[c + i] = bits_of(nearest(a[i] / by, 448, 3, -6));
    });
    if (threadIdx.x == 0)
        scales[row] = scale;
}

// out = codes scale.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
decode_float8_rows(const unsigned char* codes, const float* scales, T* out, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x;
    const float scale = scales[row];
    codes += row * columns, out += row * columns;
    packs_of_row<N>(columns, aligned(out) && columns % N == 0, [&](int c, auto pack) {
        auto a = pack.zeros();
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] = number_of(codes[c + i]) * scale;
        pack.store(out + c, a);
    });
}
