// Attention a tile of keys and queries at a time, between products (hpc3d/ops/chunked_attention.py):
// what a tile adds is merged with what others have added, with the log-sum-exps L of the scores.
//
// Scores are [heads, key, group, query]: the queries of a group share the keys of their head, and
// a matrix of the grid is a head of queries.  L and dots are [heads, group, sequence], the tile's
// queries begin at number `first` of them.  Query q sees the keys up to q + ahead, those that
// `padding` does not hide (null if it hides none).  Dropout is that of a matrix with rows of
// `width` elements: a row is a key of a head of queries, the tile begins at (first_row,
// first_column); `dropout_key` is null without.
#include "attention.cuh"

// The pack of queries of a thread in its matrix.
template <typename T>
struct Column {
    static constexpr int N = WIDTH<T>;
    int query, keys, ahead;
    long long start, step, sums;
    const bool* padding;

    __device__ Column(const bool* padding, int keys, int queries, int group, int ahead, int first,
                      int sequence)
        : query((blockIdx.y * 8 + threadIdx.x) * N),
          keys(query < queries ? keys : 0),
          ahead(ahead),
          start((static_cast<long long>(blockIdx.x / group) * keys * group + blockIdx.x % group)
                * queries + query),
          step(static_cast<long long>(group) * queries),
          sums(static_cast<long long>(blockIdx.x) * sequence + first + query),
          padding(padding)
    {
    }

    // Keys from here on are hidden from all N.
    __device__ int last() const { return min(query + ahead + N, keys); }
    __device__ bool sees(int i, int key) const { return key <= query + ahead + i; }
    __device__ bool some(int key) const { return key < last() && !(padding && padding[key]); }
};

// scores become p = exp(scale s - L') times dropout's factors, where L' = log(exp L + exp l) with
// the l of this tile; L becomes L', `kept` [heads, group, query] what is left of the output so far,
// exp(L - L').  Where no key is seen L' is -inf, and p is 0.
// Launch: tiles_of_queries; reads and writes scores, sums
template <typename T>
__global__ void __launch_bounds__(256)
chunk_softmax(T* scores, float* sums, float* kept, const bool* padding, const Word* dropout_key,
              int keys, int queries, int group, int ahead, int first, int sequence, float scale,
              long long first_row, long long first_column, long long width, unsigned limit,
              float factor)
{
    constexpr int N = WIDTH<T>;
    const Column<T> column(padding, keys, queries, group, ahead, first, sequence);
    const Part<N> pack = {queries - column.query, queries % N == 0 && aligned(scores)};
    Pack<N> before, top, sum = {};
#pragma unroll
    for (int i = 0; i < N; i++) {
        before[i] = i < pack.left ? sums[column.sums + i] : 0;
        top[i] = minus_infinity();
    }
    for (int key = threadIdx.y; key < column.last(); key += 32) {
        if (!column.some(key))
            continue;
        const Pack<N> a = pack.load(scores + column.start + key * column.step);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (!column.sees(i, key))
                continue;
            const float score = scale * a[i], most = Max::of(top[i], score);
            sum[i] *= top[i] < most ? expf(top[i] - most) : 1;
            sum[i] += expf(score - most);
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
                p[i] = column.sees(i, key) ? expf(scale * p[i] - total[i]) : 0;
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

// scores become p = exp(scale s - L) times dropout's factors, for the gradient of v; dweights
// ds = scale p (dp - dots), with dp = dweights times the factors.
// Launch: tiles_of_queries; reads and writes scores, dweights
template <typename T>
__global__ void __launch_bounds__(256)
chunk_softmax_grad(T* scores, T* dweights, const float* sums, const float* dots,
                   const bool* padding, const Word* dropout_key, int keys, int queries, int group,
                   int ahead, int first, int sequence, float scale, long long first_row,
                   long long first_column, long long width, unsigned limit, float factor)
{
    constexpr int N = WIDTH<T>;
    const Column<T> column(padding, keys, queries, group, ahead, first, sequence);
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
                p[i] = column.sees(i, key) ? expf(scale * p[i] - total[i]) : 0;
                d[i] = scale * p[i] * (d[i] * f[i] - dot[i]);
                p[i] *= f[i];
            }
        }
        pack.store(scores + place, p);
        pack.store(dweights + place, d);
    }
}

// out = kept out + added (kept is 1 where it is null): out has a row per query, of which the columns
// from `first` on are heads of `width`; `added` is [heads, query, width], `kept` [heads, query].  A
// block has a row.
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

// dots[sample, head, token] = the sum of x y over the `width` features of a head.  A block has a
// row of x and y [sample, token, head, feature], a warp every so many heads.
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

// Merge the output `added` of a fused kernel for one block of keys, [sample, query, head, feature],
// into `out`: out = exp(L - L') out + exp(l - L') added, with the log-sum-exps L of the earlier keys
// (`sums`), l of these keys (`added_sums`), and L' = log(exp L + exp l), which replaces L.  If `sums`
// is null, out += added.  The first query is number `first` of the `sequence` queries in each row of
// sums [sample, head, sequence]; `added_sums` is [sample, head, query].  A block has a query, and
// each warp some of its heads.
// Launch: block_per_row; reads and writes out, sums
template <typename T>
__global__ void __launch_bounds__(256)
merge_hop(float* out, const T* added, float* sums, const float* added_sums, int queries, int heads,
          int width, int first, int sequence)
{
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const long long row = blockIdx.x, sample = row / queries, query = row % queries;
    for (int head = threadIdx.x / 32; head < heads; head += warps) {
        float kept = 1, share = 1;
        if (sums) {
            float* place = sums + (sample * heads + head) * sequence + first + query;
            // Lane 0 reads and writes; the sum over the lanes is a broadcast.
            const float before = warp_all<Sum>(lane ? 0.0f : *place);
            const float mine = added_sums[(sample * heads + head) * queries + query];
            const float larger = Max::of(before, mine);
            const float total = larger + logf(expf(before - larger) + expf(mine - larger));
            kept = expf(before - total);
            share = expf(mine - total);
            if (lane == 0)
                *place = total;
        }
        const long long start = (row * heads + head) * width;
        for (int c = lane; c < width; c += 32)
            out[start + c] = kept * out[start + c] + share * to_float(added[start + c]);
    }
}
