// Kernels of chunked attention (hpc3d/ops/chunked_attention.py), which run between GEMMs on one
// tile of keys and queries at a time. The contributions of the tiles are merged with the help of
// L, the log-sum-exps of the scores.
//
// Scores have the layout [heads, key, group, query]. The query heads of a group share the keys of
// one head, and each score matrix of the grid belongs to one query head. L and dots have the
// layout [heads, group, sequence]; the first query of the tile has index `first` in the sequence.
// Query q attends to the keys up to q + ahead, or only to the last `window` of them (0: no window),
// that are not masked by `padding` (null: no padding). It does not attend to keys before the
// position starts[q], the beginning of its document (null: no documents); the first key of the tile
// is at `key_position`.
// The dropout mask is a matrix with rows of `width` elements and one row per key and query head.
// The tile starts at element (first_row, first_column) of this matrix. `dropout_key` is null
// without dropout.
#include "attention.cuh"

// Pack of queries that a thread processes in its score matrix.
template <typename T>
struct Column {
    static constexpr int N = WIDTH<T>;
    int query, keys, ahead;
    Band band;
    long long start, step, sums;
    const bool* padding;
    int begin[N];

    __device__ Column(const bool* padding, const long long* starts, int key_position, int keys,
                      int queries, int group, int ahead, int window, int first, int sequence)
        : query((blockIdx.y * 8 + threadIdx.x) * N),
          keys(query < queries ? keys : 0),
          ahead(ahead),
          band{1, window},
          start((static_cast<long long>(blockIdx.x / group) * keys * group + blockIdx.x % group)
                * queries + query),
          step(static_cast<long long>(group) * queries),
          sums(static_cast<long long>(blockIdx.x) * sequence + first + query),
          padding(padding)
    {
#pragma unroll
        for (int i = 0; i < N; i++)
            begin[i] = starts && query + i < queries
                           ? static_cast<int>(starts[query + i] - key_position) : 0;
    }

    // The keys before from() and from last() on are masked for all N queries.
    __device__ int from() const { return band.first(query + ahead); }
    __device__ int last() const { return min(query + ahead + N, keys); }
    __device__ bool sees(int i, int key) const
    {
        return key >= begin[i] && band.sees(query + ahead + i, key);
    }
    __device__ bool some(int key) const
    {
        return key >= from() && key < last() && !(padding && padding[key]);
    }
};

// Overwrite the products x = q k^T with p = exp(s - L') * dropout factors, where s = scale x is the
// score, or cap tanh(scale x / cap) if `cap` is not 0. L' = log(exp L + exp l), where l is the
// log-sum-exp of this tile, and L' replaces L. The factor exp(L - L'), by which the earlier output
// must be multiplied, is written to `kept` [heads, group, query]. If all keys of a query are
// masked, L' is -inf and p is 0.
// Launch: tiles_of_queries; reads and writes scores, sums
template <typename T>
__global__ void __launch_bounds__(256)
chunk_softmax(T* scores, float* sums, float* kept, const bool* padding, const long long* starts,
              const Word* dropout_key, int key_position, int keys, int queries, int group,
              int ahead, int window, int first, int sequence, float scale, float cap,
              long long first_row, long long first_column, long long width, unsigned limit,
              float factor)
{
    constexpr int N = WIDTH<T>;
    const Score score(scale, cap);
    const Column<T> column(padding, starts, key_position, keys, queries, group, ahead, window, first,
                           sequence);
    const Part<N> pack = {queries - column.query, queries % N == 0 && aligned(scores)};
    Pack<N> before, top, sum = {};
#pragma unroll
    for (int i = 0; i < N; i++) {
        before[i] = i < pack.left ? sums[column.sums + i] : 0;
        top[i] = minus_infinity();
    }
    for (int key = column.from() + threadIdx.y; key < column.last(); key += 32) {
        if (!column.some(key))
            continue;
        const Pack<N> a = pack.load(scores + column.start + key * column.step);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (!column.sees(i, key))
                continue;
            const float s = score.of(a[i]), most = Max::of(top[i], s);
            sum[i] *= top[i] < most ? expf(top[i] - most) : 1;
            sum[i] += expf(s - most);
            top[i] = most;
        }
    }
    const Pack<N> most = column_all<Max>(top);
#pragma unroll
    for (int i = 0; i < N; i++)
        sum[i] = sum[i] ? sum[i] * expf(top[i] - most[i]) : 0;
    Pack<N> total = column_all<Sum>(sum);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float mine = total[i] ? most[i] + logf(total[i]) : minus_infinity();
        const float larger = Max::of(before[i], mine);
        const bool none = larger == minus_infinity();
        total[i] = none ? 0 : larger + logf(expf(before[i] - larger) + expf(mine - larger));
        if (threadIdx.y == 0 && i < pack.left) {
            sums[column.sums + i] = none ? larger : total[i];
            kept[static_cast<long long>(blockIdx.x) * queries + column.query + i]
                = expf(before[i] - total[i]);
        }
    }
    Draws draws(dropout_key);
    for (int key = threadIdx.y; key < column.keys; key += 32) {
        T* place = scores + column.start + key * column.step;
        Pack<N> p = {};
        if (column.some(key)) {
            p = pack.load(place);
#pragma unroll
            for (int i = 0; i < N; i++)
                p[i] = column.sees(i, key) ? expf(score.of(p[i]) - total[i]) : 0;
        }
        if (dropout_key) {
            const Word e = (first_row + blockIdx.x * width + key) * width + first_column;
            const Pack<N> f
                = dropout<N>(draws, e + column.query, limit, rounded<T>(factor));
#pragma unroll
            for (int i = 0; i < N; i++)
                p[i] *= f[i];
        }
        pack.store(place, p);
    }
}

// Overwrite the products x with p * dropout factors, for the gradient of v, where p = exp(s - L).
// Overwrite dweights with dx = slope p (dp - dots), where dp = dweights * factors, and slope is the
// derivative of the score s.
// Launch: tiles_of_queries; reads and writes scores, dweights
template <typename T>
__global__ void __launch_bounds__(256)
chunk_softmax_grad(T* scores, T* dweights, const float* sums, const float* dots,
                   const bool* padding, const long long* starts, const Word* dropout_key,
                   int key_position, int keys, int queries, int group, int ahead, int window,
                   int first, int sequence, float scale, float cap, long long first_row,
                   long long first_column, long long width, unsigned limit, float factor)
{
    constexpr int N = WIDTH<T>;
    const Score score(scale, cap);
    const Column<T> column(padding, starts, key_position, keys, queries, group, ahead, window, first,
                           sequence);
    const bool wide = queries % N == 0 && aligned(scores, dweights);
    const Part<N> pack = {queries - column.query, wide};
    Pack<N> total, dot;
#pragma unroll
    for (int i = 0; i < N; i++) {
        total[i] = i < pack.left ? sums[column.sums + i] : 0;
        dot[i] = i < pack.left ? dots[column.sums + i] : 0;
    }
    Draws draws(dropout_key);
    for (int key = threadIdx.y; key < column.keys; key += 32) {
        const long long place = column.start + key * column.step;
        Pack<N> p = {}, d = {};
        if (column.some(key)) {
            p = pack.load(scores + place);
            d = pack.load(dweights + place);
            Pack<N> f;
#pragma unroll
            for (int i = 0; i < N; i++)
                f[i] = 1;
            if (dropout_key) {
                const Word e = (first_row + blockIdx.x * width + key) * width + first_column;
                f = dropout<N>(draws, e + column.query, limit, rounded<T>(factor));
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float slope = score.slope(p[i]);
                p[i] = column.sees(i, key) ? expf(score.of(p[i]) - total[i]) : 0;
                d[i] = slope * p[i] * (d[i] * f[i] - dot[i]);
                p[i] *= f[i];
            }
        }
        pack.store(scores + place, p);
        pack.store(dweights + place, d);
    }
}

// out = kept out + added, with kept = 1 if `kept` is null. `out` has one row per query, in which
// heads of `width` columns start at column `first`. `added` has the layout [heads, query, width],
// and `kept` [heads, query]. Each block processes one row.
// Launch: block_per_row; reads and writes out
__global__ void __launch_bounds__(256)
merge_chunk(float* out, const float* added, const float* kept, int queries, int columns, int width,
            int first, int stride)
{
    const long long query = blockIdx.x;
    out += query * stride + first;
    packs_of_row<4>(columns, width % 4 == 0 && aligned(out, added), [&](int c, auto pack) {
        const long long row = c / width * static_cast<long long>(queries) + query;
        auto a = pack.load(out + c);
        const auto b = pack.load(added + row * width + c % width);
        const float factor = kept ? kept[row] : 1;
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            a[i] = factor * a[i] + b[i];
        pack.store(out + c, a);
    });
}

// dots[sample, head, token] = sum of x y over the `width` features of a head. Each block processes
// one row (sample, token) of x and y [sample, token, head, feature], and each warp some of its
// heads.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
row_dots(const T* x, const T* y, float* dots, int heads, int width, int sequence)
{
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const long long row = blockIdx.x, sample = row / sequence, token = row % sequence;
    for (int head = threadIdx.x / 32; head < heads; head += warps) {
        const long long start = (row * heads + head) * width;
        float sum = 0;
        for (int c = lane; c < width; c += 32)
            sum += to_float(x[start + c]) * to_float(y[start + c]);
        sum = warp_all<Sum>(sum);
        if (lane == 0)
            dots[(sample * heads + head) * sequence + token] = sum;
    }
}

// Merge the output `added` of a fused kernel for one block of keys, [sample, query, head,
// feature], into `out`: out = exp(L - L') out + exp(l - L') added, with the log-sum-exps L of the
// earlier keys (`sums`), l of these keys (`added_sums`), and L' = log(exp L + exp l), which
// replaces L. If `sums` is null, out += added. The first query has index `first` among the
// `sequence` queries in each row of sums [sample, head, sequence]; `added_sums` has the layout
// [sample, head, query]. If all keys of a query are masked, its l is less than `least`; then,
// nothing is added, and l becomes `least`. Each block processes one query, and each warp some of
// its heads.
// Launch: block_per_row; reads and writes out, sums
template <typename T>
__global__ void __launch_bounds__(256)
merge_hop(float* out, const T* added, float* sums, const float* added_sums, int queries, int heads,
          int width, int first, int sequence, float least)
{
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const long long row = blockIdx.x, sample = row / queries, query = row % queries;
    for (int head = threadIdx.x / 32; head < heads; head += warps) {
        float kept = 1, share = 1;
        if (sums) {
            float* place = sums + (sample * heads + head) * sequence + first + query;
            // Only lane 0 reads and writes; the sum over all lanes broadcasts its value.
            const float before = warp_all<Sum>(lane ? 0.0f : *place);
            const float found = added_sums[(sample * heads + head) * queries + query];
            const float mine = Max::of(found, least);
            const float larger = Max::of(before, mine);
            const float total = larger + logf(expf(before - larger) + expf(mine - larger));
            kept = expf(before - total);
            share = found < least ? 0 : expf(mine - total);
            if (lane == 0)
                *place = total;
        }
        const long long start = (row * heads + head) * width;
        for (int c = lane; c < width; c += 32)
            out[start + c] = kept * out[start + c] + share * to_float(added[start + c]);
    }
}
