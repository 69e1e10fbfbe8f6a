// Softmax of attention and its gradient, used between two GEMMs if no fused attention is
// available, and kernels for padding in fused attention. With `causal`, a query attends only to
// keys up to its own position, or only to the last `window` of them (0: no window).
//
// All matrices have the layout [B, heads, key, query]. The softmax reduces over a column, so
// adjacent threads process adjacent queries. Dropout numbers the elements as
// hpc3d/ops/attention.py does.
#include "attention.cuh"

// Return the dropout factors of N queries and one key. The factors form a matrix with one row per
// sample and `width` columns. The elements [heads, key, query] of this rank start at first_column.
template <int N>
__device__ Pack<N> dropout_of(Draws& draws, int heads, int sequence, int key, int query,
                              long long first_row, long long first_column, long long width,
                              unsigned limit, float factor)
{
    const long long row = first_row + blockIdx.x / heads, head = blockIdx.x % heads;
    const Word e = row * width + first_column + (head * sequence + key) * sequence + query;
    return dropout<N>(draws, e, limit, factor);
}

// p = softmax(s + mask) with the scores s = scale x or, if `cap` is not 0, cap tanh(scale x / cap)
// of the products x, which are overwritten. With dropout, weights = p * factors.
//
// `padding` [B, sequence] marks masked keys; it is null if no key is masked. If all keys of a
// query are masked, its probabilities are 0. A query does not attend to keys before its element of
// `starts` [B, sequence], the beginning of its document; it is null without documents. `dropout_key` and `weights` are null without dropout.
// A thread computes the maximum and the sum of its keys in one pass, and the 32 threads of a
// column combine their results.
// Launch: tiles_of_queries; reads and writes scores
template <typename T>
__global__ void __launch_bounds__(256)
causal_softmax(T* scores, T* weights, const bool* padding, const long long* starts,
               const Word* dropout_key, int causal, int window, int heads, int sequence,
               float scale, float cap, long long first_row, long long first_column,
               long long width, unsigned limit, float factor)
{
    constexpr int N = WIDTH<T>;
    const int query = (blockIdx.y * 8 + threadIdx.x) * N;
    const Band band = {causal, window};
    const Score score(scale, cap);
    // The keys before `from` and from `last` on are masked for all N queries.
    const int from = band.first(query), last = causal ? min(query + N, sequence) : sequence;
    const bool* hidden = padding ? padding + blockIdx.x / heads * sequence : nullptr;
    const int keys = query < sequence ? sequence : 0;
    const long long start = static_cast<long long>(blockIdx.x) * sequence * sequence + query;
    const Part<N> pack = {sequence - query, sequence % N == 0 && aligned(scores, weights)};
    int begin[N];
    Pack<N> top, sum = {};
#pragma unroll
    for (int i = 0; i < N; i++) {
        begin[i] = starts && i < pack.left
                       ? static_cast<int>(starts[blockIdx.x / heads * sequence + query + i]) : 0;
        top[i] = minus_infinity();
    }
    for (int key = from + threadIdx.y; key < min(last, keys); key += 32) {
        if (hidden && hidden[key])
            continue;
        const Pack<N> a = pack.load(scores + start + static_cast<long long>(key) * sequence);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (key < begin[i] || !band.sees(query + i, key))
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
    Pack<N> inverse = column_all<Sum>(sum);  // divisions in the loop below would spill registers
#pragma unroll
    for (int i = 0; i < N; i++)
        inverse[i] = 1 / inverse[i];
    Draws draws(dropout_key);
    for (int key = threadIdx.y; key < keys; key += 32) {
        const long long place = start + static_cast<long long>(key) * sequence;
        const bool some = key >= from && key < last && !(hidden && hidden[key]);
        Pack<N> p = {};
        if (some)
            p = pack.load(scores + place);
#pragma unroll
        for (int i = 0; i < N; i++)
            p[i] = some && key >= begin[i] && band.sees(query + i, key)
                       ? expf(score.of(p[i]) - most[i]) * inverse[i] : 0;
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

// dx = slope p (dp - sum over keys of dp p), where dp = dweights * dropout factors, and slope is the
// derivative of the scores. The result overwrites dweights. The first pass computes the sum. With a
// soft cap, `scores` are the products x before scaling; otherwise, it is null.
// Launch: tiles_of_queries; reads and writes dweights
template <typename T>
__global__ void __launch_bounds__(256)
causal_softmax_grad(const T* p, T* dweights, const T* scores, const Word* dropout_key, int causal,
                    int window, int heads, int sequence, float scale, float cap,
                    long long first_row, long long first_column, long long width, unsigned limit,
                    float factor)
{
    constexpr int N = WIDTH<T>;
    const int query = (blockIdx.y * 8 + threadIdx.x) * N;
    const Band band = {causal, window};
    const Score score(scale, cap);
    const int last = causal ? min(query + N, sequence) : sequence;
    const int keys = query < sequence ? sequence : 0;
    const long long start = static_cast<long long>(blockIdx.x) * sequence * sequence + query;
    const Part<N> pack = {sequence - query, sequence % N == 0 && aligned(p, dweights, scores)};
    Draws draws(dropout_key);
    Pack<N> sum = {};
#pragma unroll 1
    for (int pass = 1; pass <= 2; pass++) {
        for (int key = threadIdx.y; key < keys; key += 32) {
            const long long place = start + static_cast<long long>(key) * sequence;
            Pack<N> a = {}, d = {}, x = {};
            if (key < last) {
                a = pack.load(p + place);
                d = pack.load(dweights + place);
                if (scores && pass == 2)
                    x = pack.load(scores + place);
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
                const bool seen = band.sees(query + i, key);
                if (pass == 1)
                    sum[i] += seen ? a[i] * d[i] : 0;
                d[i] = seen ? score.slope(x[i]) * a[i] * (d[i] - sum[i]) : 0;
            }
            if (pass == 2)
                pack.store(dweights + place, d);
        }
        if (pass == 1)
            sum = column_all<Sum>(sum);
    }
}

// p = softmax(s) for attention to cached keys, with the scores s of causal_softmax. The
// rows are [B heads, queries], and the columns are keys. Query i of `queries` attends to the first
// first + i + 1 keys, or only to the last `window` of them (0: no window). The probabilities of all
// other keys are 0. Each block processes one row.
// Launch: block_per_row; reads and writes scores
template <typename T>
__global__ void __launch_bounds__(256)
cached_softmax(T* scores, int queries, int first, int columns, int window, float scale, float cap)
{
    const Score score(scale, cap);
    const long long row = blockIdx.x;
    const int query = first + static_cast<int>(row % queries), seen = query + 1;
    const int from = Band{1, window}.first(query);
    T* mine = scores + row * columns;
    float most = minus_infinity(), sum = 0;
    for (int c = from + threadIdx.x; c < seen; c += blockDim.x)
        most = Max::of(most, score.of(to_float(mine[c])));
    most = block_all<Max>(most);
    for (int c = from + threadIdx.x; c < seen; c += blockDim.x)
        sum += expf(score.of(to_float(mine[c])) - most);
    sum = block_sum(sum);
    for (int c = threadIdx.x; c < columns; c += blockDim.x)
        put(mine[c], c >= from && c < seen ? expf(score.of(to_float(mine[c])) - most) / sum : 0);
}

// bias [sample, key] = `masked` for masked keys, else 0: the bias of scores in fused attention. The
// first key has index `first` among the `sequence` keys in each row of padding [sample, sequence].
// Each block processes one sample.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
padding_bias(T* bias, const bool* padding, int keys, int first, int sequence, float masked)
{
    const long long row = blockIdx.x;
    for (int key = threadIdx.x; key < keys; key += blockDim.x)
        put(bias[row * keys + key], padding[row * sequence + first + key] ? masked : 0.0f);
}

// Complete the output of fused attention with padding, [sample, query, head, feature]. If all keys
// of a query are masked, its log-sum-exp L [sample, head, query] is less than `least`. Its output
// becomes 0, and L becomes `least`, for which the backward pass computes probabilities of 0. Each
// block processes one query, and each warp some of its heads.
// Launch: block_per_row; reads and writes sums
template <typename T>
__global__ void __launch_bounds__(256)
clear_masked(T* out, float* sums, int heads, int width, int sequence, float least)
{
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const long long row = blockIdx.x, sample = row / sequence, query = row % sequence;
    for (int head = threadIdx.x / 32; head < heads; head += warps) {
        float* place = sums + (sample * heads + head) * sequence + query;
        // Only lane 0 reads and writes; the sum over all lanes broadcasts its value.
        if (warp_all<Sum>(lane ? 0.0f : *place) >= least)
            continue;
        for (int c = lane; c < width; c += 32)
            put(out[(row * heads + head) * width + c], 0);
        if (lane == 0)
            *place = least;
    }
}
