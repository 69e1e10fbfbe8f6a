// Rotary position embedding (Su et al., arXiv:2104.09864).
#include "common.cuh"

// Rotate the pairs (i, i + half), i < half, of the rows of X [rows, heads, parts, width] in place
// by the angle of their position: (a, b) -> (a cos - b sin, b cos + a sin). The features from
// 2 half on are unchanged.
//
// Only the first `turned` parts are rotated, such as q and k of [q | k | v]. Row r has position
// (first + r) mod period, which is the row index in the tables [period, half]. With sign = -1, the
// rotation is inverted, as the backward pass requires. Each block processes one row, and each
// thread packs of both halves.
// Launch: block_per_row; reads and writes x
template <typename T>
__global__ void __launch_bounds__(256)
rotate(T* x, const float* cosines, const float* sines, long long first, int period, int parts,
       int turned, int half, int width, int columns, float sign)
{
    constexpr int N = WIDTH<T>;
    const int packs = (half + N - 1) / N;
    const int all = columns / (parts * width) * turned * packs;
    const long long row = blockIdx.x, place = (first + row) % period * half;
    const bool wide = half % N == 0 && width % N == 0 && aligned(x, cosines, sines);
    for (int k = threadIdx.x; k < all; k += blockDim.x) {
        const int vector = k / packs, i = k % packs * N;
        T* low = x + row * columns + (vector / turned * parts + vector % turned) * width + i;
        pack_of_columns<N>(half - i, wide, [&](auto pack) {
            Pack<N> a = pack.load(low), b = pack.load(low + half);
            const Pack<N> cosine = pack.load(cosines + place + i);
            const Pack<N> sine = pack.load(sines + place + i);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float u = a[j], v = b[j], s = sign * sine[j];
                a[j] = u * cosine[j] - v * s;
                b[j] = v * cosine[j] + u * s;
            }
            pack.store(low, a);
            pack.store(low + half, b);
        });
    }
}
