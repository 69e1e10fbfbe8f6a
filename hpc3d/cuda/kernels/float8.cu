// Float8 rounding by tiles, and float8 codes of tensors and rows (hpc3d/ops/float8.py,
// quantize.py).
#include "common.cuh"

// Return the nearest number with `digits` mantissa bits, ties to even. The spacing of the numbers
// is at least that of the numbers from 2^lowest to 2^(lowest + 1). Magnitudes saturate at `most`.
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

// maxima [rows, across] = max |x| over the columns of each row in each tile. Tiles have `width`
// columns, and the first one starts `left` columns before x.
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

// maxima [down, columns] = maxima of `partial` [rows, columns] over tiles of `height` rows. The
// first tile starts `top` rows before `partial`.
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

// out = s round(x / s) with s = maxima / most, for rows [m, experts] of x and maxima [down,
// experts, across].
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

// Return the float8 bits of a number that `nearest` returned. NaN has the same bits in both
// formats.
__device__ inline unsigned char bits_of(float number, int digits, int lowest)
{
    if (isnan(number))
        return 0x7f;
    const int sign = signbit(number) ? 0x80 : 0;
    if (number == 0)  // frexp returns no exponent for 0
        return sign;
    number = fabsf(number);
    int exponent;
    frexpf(number, &exponent);
    exponent = max(exponent - 1, lowest);
    const int steps = static_cast<int>(ldexpf(number, digits - exponent));
    return sign | (((exponent - lowest) << digits) + steps);
}

// codes = round(x / scale) for a flat array, with scale [1] = largest [1] / most.
// Launch: strided
template <typename T>
__global__ void __launch_bounds__(256)
encode_tensor(
    const T* x, const float* largest, unsigned char* codes, float* scale, long long size,
    float most, int digits, int lowest)
{
    constexpr int N = WIDTH<T>;
    const float by = divisor(*largest, most);
    packs_of_grid<N>(size, aligned(x), [&](long long c, auto pack) {
        const auto a = pack.load(x + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            codes[c + i] = bits_of(nearest(a[i] / by, most, digits, lowest), digits, lowest);
    });
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *scale = by;
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
            codes[c + i] = bits_of(nearest(a[i] / by, 448, 3, -6), 3, -6);
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
