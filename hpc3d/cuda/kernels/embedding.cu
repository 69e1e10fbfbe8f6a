// Embedding lookup by token, its gradient, and position embeddings. Unless stated otherwise, each
// block processes one row, and each thread every blockDim-th pack of its columns.
#include "common.cuh"

// out[r] = table[index[r]] + positions[(first + r) mod period]. The first term is 0 if the index
// is outside this rank's shard of the table, and the second if `positions` is null.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
gather_rows(const T* table, const long long* index, const T* positions, T* out,
            long long table_rows, long long first, int period, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x, token = index[row];
    const long long place = positions ? (first + row) % period : 0;
    const T* found = token >= 0 && token < table_rows ? table + token * columns : nullptr;
    const T* added = positions ? positions + place * columns : nullptr;
    out += row * columns;
    packs_of_row<N>(columns, aligned(found, added, out), [&](int c, auto pack) {
        auto a = pack.zeros(), b = pack.zeros();
        if (found)
            a = pack.load(found + c);
        if (added)
            b = pack.load(added + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] += b[i];
        pack.store(out + c, a);
    });
}

// total[t] += sum of the rows of dy with index t, in the order of the rows.
//
// `order` is a permutation that stably sorts the index, so the rows of a token are adjacent. Block
// (position, tile) returns immediately unless the rows of a token start at its position.
// Otherwise, it sums the rows of this token in a tile of 32 packs of columns. No other block
// writes this tile.
// Launch: row_by_tiles
template <typename T>
__global__ void __launch_bounds__(32)
scatter_rows(const T* dy, const long long* index, const long long* order, float* total,
             long long table_rows, int rows, int columns)
{
    constexpr int N = WIDTH<T>;
    const int begin = blockIdx.x, c = (blockIdx.y * 32 + threadIdx.x) * N;
    const long long token = index[order[begin]];
    const bool present = token >= 0 && token < table_rows;
    if (!present || (begin > 0 && index[order[begin - 1]] == token))
        return;
    float* mine = total + token * columns + c;
    pack_of_columns<N>(columns - c, columns % N == 0 && aligned(dy, total), [&](auto pack) {
        Pack<N> sum = pack.load(mine);
        for (int at = begin; at < rows && index[order[at]] == token; at++) {
            const Pack<N> a = pack.load(dy + order[at] * columns + c);
#pragma unroll
            for (int i = 0; i < N; i++)
                sum[i] += a[i];
        }
        pack.store(mine, sum);
    });
}

// out[r] = x[r] + table[(first + r) mod period].
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
add_repeated(const T* x, const T* table, T* out, long long first, int period, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x, place = (first + row) % period;
    x += row * columns, out += row * columns, table += place * columns;
    packs_of_row<N>(columns, aligned(x, table, out), [&](int c, auto pack) {
        auto a = pack.load(x + c);
        const auto b = pack.load(table + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] += b[i];
        pack.store(out + c, a);
    });
}

// total[p] = sum of the rows r of dx with (first + r) mod period = p. If `add` is set, the sum is
// added to total[p]. Each block processes one p, and 0 <= first < period.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256) sum_repeated(const T* dx, float* total, int first,
                                                    int period, int rows, int columns, int add)
{
    constexpr int N = WIDTH<T>;
    const int place = blockIdx.x;
    float* mine = total + static_cast<long long>(place) * columns;
    const bool wide = columns % N == 0 && aligned(dx, total);
    packs_of_row<N>(columns, wide, [&](int c, auto pack) {
        auto sum = pack.zeros();
        if (add)
            sum = pack.load(mine + c);
        for (long long row = (place - first + period) % period; row < rows; row += period) {
            const auto a = pack.load(dx + row * columns + c);
#pragma unroll
            for (int i = 0; i < pack.size; i++)
                sum[i] += a[i];
        }
        pack.store(mine + c, sum);
    });
}
