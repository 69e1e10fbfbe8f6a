// Random numbers that depend only on a key and on the global index of an element, not on its
// layout. They equal those of hpc3d/ops/random.py. In a matrix with `width` columns, the global
// index is row * width + column. This rank's block starts at (first_row, first_column); if `rows`
// is not null, it lists the rows of the block. Each thread block processes one row.
#include "common.cuh"
#include "random.cuh"

// out = x times 0 or `factor`. A block of random numbers is sufficient for 16 elements, so each
// thread processes 16 elements at a time.
// Launch: row_of 16
template <typename T>
__global__ void __launch_bounds__(256)
dropped(const T* x, T* out, const Word* key, const long long* rows, long long first_row,
        long long first_column, long long width, int columns, unsigned limit, float factor)
{
    constexpr int N = 16;
    const long long start = static_cast<long long>(blockIdx.x) * columns;
    const long long row = rows ? rows[blockIdx.x] : first_row + blockIdx.x;
    const Word first = row * width + first_column;
    Draws draws(key);
    x += start, out += start;
    packs_of_row<N>(columns, aligned(x, out), [&](int c, auto pack) {
        auto a = pack.load(x + c);
        const auto f = dropout<pack.size>(draws, first + c, limit, rounded<T>(factor));
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] *= f[i];
        pack.store(out + c, a);
    });
}

// value = std times independent standard normal numbers sqrt(-2 log u) cos(v) (Box and Muller). u
// in (0, 1] is computed from the upper half of a 64-bit random number, and v in [0, 2 pi) from the
// lower half, in double precision.
// Launch: row_of 4
template <typename T>
__global__ void __launch_bounds__(256)
initialise(T* value, const Word* key, long long first_row, long long first_column,
           long long width, int columns, double std)
{
    const double unit = 1.0 / 4294967296.0, circle = 6.283185307179586 * unit;
    const long long start = static_cast<long long>(blockIdx.x) * columns;
    const Word first = (first_row + blockIdx.x) * width + first_column;
    Draws draws(key);
    for (int c = threadIdx.x * 4; c < columns; c += blockDim.x * 4) {
#pragma unroll 1
        for (int i = 0; i < 4 && c + i < columns; i++) {
            draws.make((first + c + i) / 4);
            const Word bits = draws.draw((first + c + i) % 4);
            const double radius = ((bits >> 32) + 1.0) * unit;
            const double angle = (bits & 0xffffffff) * circle;
            put(value[start + c + i], sqrt(-2 * log(radius)) * cos(angle) * std);
        }
    }
}
