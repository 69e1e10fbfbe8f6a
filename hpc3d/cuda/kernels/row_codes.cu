// 8-bit rows of a matrix: integers from -127 to 127, multiplied by one scale per row.
#include "common.cuh"

// codes = round(x / scale), scales [rows] = max |x| / 127. A non-finite element makes the scale
// non-finite.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
encode_rows(const T* x, signed char* codes, float* scales, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x;
    x += row * columns, codes += row * columns;
    const bool wide = aligned(x) && columns % N == 0;
    float most = 0;
    packs_of_row<N>(columns, wide, [&](int c, auto pack) {
        const auto a = pack.load(x + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            most = Max::of(most, fabsf(a[i]));
    });
    const float scale = block_all<Max>(most) / 127;
    const float divisor = scale > 0 ? scale : 1;
    packs_of_row<N>(columns, wide, [&](int c, auto pack) {
        const auto a = pack.load(x + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            codes[c + i] = static_cast<signed char>(rintf(a[i] / divisor));
    });
    if (threadIdx.x == 0)
        scales[row] = scale;
}

// out = codes scale.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
decode_rows(const signed char* codes, const float* scales, T* out, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x;
    const float scale = scales[row];
    codes += row * columns, out += row * columns;
    packs_of_row<N>(columns, aligned(out) && columns % N == 0, [&](int c, auto pack) {
        auto a = pack.zeros();
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] = codes[c + i] * scale;
        pack.store(out + c, a);
    });
}
