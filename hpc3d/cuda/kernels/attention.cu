// The softmax of causal attention between two products, and its gradient: what is left to do where
// no fused attention is at hand.
//
// All matrices are [B, heads, key, query]: a softmax runs down a column, neighbouring threads have
// neighbouring queries, and dropout numbers its draws as hpc3d/model/attention.py does.
//
// The grid is (B heads, tiles of queries), a block 8 x 32 threads: thread (x, y) has a pack of
// queries, 8 packs are 128 bytes, and every 32nd key.
#include "common.cuh"
#include "random.cuh"

// Over the 32 threads with the same x, the same in each of them.
template <typename Of, int N>
__device__ Pack<N> column_all(const Pack<N>& mine)
{
    __shared__ float tile[32][8 * N];
    const int k = threadIdx.y * 8 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < N; i++)
        tile[threadIdx.y][threadIdx.x * N + i] = mine[i];
    __syncthreads();
    if (k < 8 * N)
        for (int y = 1; y < 32; y++)
            tile[0][k] = Of::of(tile[0][k], tile[y][k]);
    __syncthreads();
    Pack<N> all;
#pragma unroll
    for (int i = 0; i < N; i++)
        all[i] = tile[0][threadIdx.x * N + i];
    __syncthreads();  // the tile may be filled again
    return all;
}

// Dropout's factors of N queries of a key: all samples are rows of a matrix with `width` columns,
// of which those from first_column on are [heads, key, query] of this rank.
template <int N>
__device__ Pack<N> dropout_of(Draws& draws, int heads, int sequence, int key, int query,
                              long long first_row, long long first_column, long long width,
                              unsigned limit, float factor)
{
    const long long row = first_row + blockIdx.x / heads, head = blockIdx.x % heads;
    const Word e = row * width + first_column + (head * sequence + key) * sequence + query;
    return dropout<N>(draws, e, limit, factor);
}

// p = softmax(scale scores + mask) in the scores' memory; with dropout, weights = p times factors.
//
// `dropout_key` and `weights` are null without.  A thread finds maximum and sum of its keys in one
// pass, then the 32 threads of a column put theirs together.
// Launch: tiles_of_queries; reads and writes scores
template <typename T>
__global__ void __launch_bounds__(256)
causal_softmax(T* scores, T* weights, const Word* dropout_key, int heads, int sequence,
               float scale, long long first_row, long long first_column, long long width,
               unsigned limit, float factor)
{
    constexpr int N = WIDTH<T>;
    const int query = (blockIdx.y * 8 + threadIdx.x) * N;
    const int last = min(query + N, sequence);  // keys from here on are hidden from all N
    const int keys = query < sequence ? sequence : 0;
    const long long start = static_cast<long long>(blockIdx.x) * sequence * sequence + query;
    const Part<N> pack = {sequence - query, sequence % N == 0 && aligned(scores, weights)};
    Pack<N> top, sum = {};
#pragma unroll
    for (int i = 0; i < N; i++)
        top[i] = minus_infinity();
    for (int key = threadIdx.y; key < min(last, keys); key += 32) {
        const Pack<N> a = pack.load(scores + start + static_cast<long long>(key) * sequence);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (key > query + i)
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
    const Pack<N> total = column_all<Sum>(sum);
    Draws draws(dropout_key);
    for (int key = threadIdx.y; key < keys; key += 32) {
        const long long place = start + static_cast<long long>(key) * sequence;
        Pack<N> p = {};
        if (key < last)
            p = pack.load(scores + place);
#pragma unroll
        for (int i = 0; i < N; i++)
            p[i] = key > query + i ? 0 : expf(scale * p[i] - most[i]) / total[i];
        pack.store(scores + place, p);
        if (!dropout_key)
            continue;
        const Pack<N> f = dropout_of<N>(draws, heads, sequence, key, query, first_row,
                                        first_column, width, limit, rounded<T>(factor));
#pragma unroll
        for (int i = 0; i < N; i++)
            p[i] = rounded<T>(p[i]) * f[i];
        pack.store(weights + place, p);
    }
}

// ds = scale p (dp - sum over keys of dp p), with dp = dweights times dropout's factors, in the
// memory of dweights.  The first pass makes the sum.
// Launch: tiles_of_queries; reads and writes dweights
template <typename T>
__global__ void __launch_bounds__(256)
causal_softmax_grad(const T* p, T* dweights, const Word* dropout_key, int heads, int sequence,
                    float scale, long long first_row, long long first_column, long long width,
                    unsigned limit, float factor)
{
    constexpr int N = WIDTH<T>;
    const int query = (blockIdx.y * 8 + threadIdx.x) * N;
    const int last = min(query + N, sequence), keys = query < sequence ? sequence : 0;
    const long long start = static_cast<long long>(blockIdx.x) * sequence * sequence + query;
    const Part<N> pack = {sequence - query, sequence % N == 0 && aligned(p, dweights)};
    Draws draws(dropout_key);
    Pack<N> sum = {};
#pragma unroll 1
    for (int pass = 1; pass <= 2; pass++) {
        for (int key = threadIdx.y; key < keys; key += 32) {
            const long long place = start + static_cast<long long>(key) * sequence;
            Pack<N> a = {}, d = {};
            if (key < last) {
                a = pack.load(p + place);
                d = pack.load(dweights + place);
            }
            if (key < last && dropout_key) {
                const Pack<N> f = dropout_of<N>(draws, heads, sequence, key, query, first_row,
                                                first_column, width, limit, rounded<T>(factor));
#pragma unroll
                for (int i = 0; i < N; i++)
                    d[i] *= f[i];
            }
#pragma unroll
            for (int i = 0; i < N; i++) {
                const bool seen = key <= query + i;
                if (pass == 1)
                    sum[i] += seen ? a[i] * d[i] : 0;
                d[i] = seen ? scale * a[i] * (d[i] - sum[i]) : 0;
            }
            if (pass == 2)
                pack.store(dweights + place, d);
        }
        if (pass == 1)
            sum = column_all<Sum>(sum);
    }
}

// p = softmax(scale scores) in the scores' memory, of attention to keys that are kept: the rows are
// [B heads, queries] and the columns keys, of which query i of `queries` sees first + i + 1 and the
// others get 0.  A block has a row.
// Launch: block_per_row; reads and writes scores
template <typename T>
__global__ void __launch_bounds__(256)
cached_softmax(T* scores, int queries, int first, int columns, float scale)
{
    const long long row = blockIdx.x;
    const int seen = first + static_cast<int>(row % queries) + 1;
    T* mine = scores + row * columns;
    float most = minus_infinity(), sum = 0;
    for (int c = threadIdx.x; c < seen; c += blockDim.x)
        most = Max::of(most, scale * to_float(mine[c]));
    most = block_all<Max>(most);
    for (int c = threadIdx.x; c < seen; c += blockDim.x)
        sum += expf(scale * to_float(mine[c]) - most);
    sum = block_sum(sum);
    for (int c = threadIdx.x; c < columns; c += blockDim.x)
        put(mine[c], c < seen ? expf(scale * to_float(mine[c]) - most) / sum : 0);
}
