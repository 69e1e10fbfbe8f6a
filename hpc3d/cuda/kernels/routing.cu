// Mixture of experts: routing, dispatch and combine (hpc3d/ops/routing.py).
//
// `choices` [n, top_k] contains the experts of each token, and `slots` [n, top_k] the assigned
// rows of the experts' buffer, or -1. A row of the buffer belongs to at most one choice. Rows are
// therefore only gathered, and all sums have a fixed order. In a routing group, the slots are
// assigned to the first choices in the order of the tokens, then to the second choices, and so on.
#include "common.cuh"

struct Largest {
    template <typename V>
    static __device__ V start() { return 0; }
    template <typename V>
    static __device__ V of(V a, V b) { return a > b ? a : b; }
};

constexpr unsigned LAST = 0x7fffffff;

// Return an integer that orders scores; of equal scores, the lower expert comes first. The result
// is never 0 or the largest integer, even if the score is NaN.
__device__ inline unsigned long long rank_of(float score, int expert)
{
    const unsigned bits = __float_as_uint(score);
    const unsigned ordered = bits >> 31 ? ~bits : bits | 0x80000000;
    return static_cast<unsigned long long>(ordered) << 32 | (LAST - expert);
}

// Compute the softmax of a few numbers in place.
__device__ inline void softmax_of(float* numbers, int size)
{
    float most = minus_infinity(), sum = 0;
    for (int i = 0; i < size; i++)
        most = Max::of(most, numbers[i]);
    for (int i = 0; i < size; i++)
        sum += numbers[i] = expf(numbers[i] - most);
    for (int i = 0; i < size; i++)
        numbers[i] /= sum;
}

// probs = softmax(logits) for rows of `count` experts, and lse = log sum exp(logits). `experts`
// are the top_k experts with the largest probs + bias, in descending order. `weights` are the
// probs if top_k = 1, and otherwise the softmax of the logits of these experts. Each block
// processes one row, and each thread every blockDim-th expert.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
route(const T* logits, const T* bias, long long* experts, float* weights, float* probs, float* lse,
      int count, int top_k)
{
    const long long row = blockIdx.x;
    logits += row * count, probs += row * count, experts += row * top_k, weights += row * top_k;
    float most = minus_infinity(), sum = 0;
    for (int c = threadIdx.x; c < count; c += blockDim.x)
        most = Max::of(most, to_float(logits[c]));
    most = block_all<Max>(most);
    for (int c = threadIdx.x; c < count; c += blockDim.x)
        sum += expf(to_float(logits[c]) - most);
    sum = block_sum(sum);
    for (int c = threadIdx.x; c < count; c += blockDim.x)
        probs[c] = expf(to_float(logits[c]) - most) / sum;
    unsigned long long last = ~0ULL;
    for (int choice = 0; choice < top_k; choice++) {
        unsigned long long best = 0;
        for (int c = threadIdx.x; c < count; c += blockDim.x) {
            const auto rank = rank_of(probs[c] + (bias ? to_float(bias[c]) : 0), c);
            if (rank < last && rank > best)
                best = rank;
        }
        last = block_all<Largest>(best);
        const unsigned expert = LAST - static_cast<unsigned>(last);
        if (threadIdx.x == 0) {
            experts[choice] = expert;
            weights[choice] = top_k == 1 ? probs[expert] : to_float(logits[expert]);
        }
    }
    if (threadIdx.x > 0)
        return;
    if (top_k > 1)
        softmax_of(weights, top_k);
    lse[row] = most + logf(sum);
}

// Count the numbers below `size` that satisfy a predicate; all threads of the block get the
// result.
template <typename Suits>
__device__ int number_of(int size, Suits suits)
{
    int found = 0;
    for (int i = threadIdx.x; i < size; i += blockDim.x)
        found += suits(i);
    return block_sum(found);
}

// counts [groups, E]: for each routing group, how often each expert occurs among its `size`
// choices. Each block computes one count.
// Launch: block_per_row
__global__ void __launch_bounds__(256)
counts_of(const long long* choices, long long* counts, int size, int count)
{
    const long long group = blockIdx.x / count, expert = blockIdx.x % count;
    choices += group * size;
    const int found = number_of(size, [&](int i) { return choices[i] == expert; });
    if (threadIdx.x == 0)
        counts[blockIdx.x] = found;
}

// shares [S, E] = sums of counts [ranks, S, groups, E] over ranks and groups, divided by
// `choices`, the number of choices per sequence. One thread per share.
// Launch: thread_per_row
__global__ void __launch_bounds__(256) shares_of(const long long* counts, float* shares, int ranks,
                                                 int sequences, int groups, int count,
                                                 float choices)
{
    const long long at = blockIdx.x * 256LL + threadIdx.x;
    if (at >= 1LL * sequences * count)
        return;
    const long long sequence = at / count, expert = at % count;
    long long sum = 0;
    for (int rank = 0; rank < ranks; rank++)
        for (int g = 0; g < groups; g++)
            sum += counts[((1LL * rank * sequences + sequence) * groups + g) * count + expert];
    shares[at] = sum / choices;
}

// Return the sum of `value` over the preceding threads of the warp; `total` is the sum over all.
__device__ inline int sum_before(int value, int& total)
{
    int before = 0;
    total = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_xor_sync(0xffffffff, total, distance);
        before += threadIdx.x & distance ? other : 0;
        total += other;
    }
    return before;
}

// Return the same sums for a one-dimensional block of complete warps.
__device__ inline int block_sum_before(int value, int& total)
{
    __shared__ int parts[32];
    const unsigned warp = threadIdx.x / 32;
    int before = sum_before(value, total);
    __syncthreads();  // all threads have read the parts of the previous call
    if (threadIdx.x % 32 == 0)
        parts[warp] = total;
    __syncthreads();
    total = 0;
    for (unsigned other = 0; other < blockDim.x / 32; other++) {
        before += other < warp ? parts[other] : 0;
        total += parts[other];
    }
    return before;
}

// Assign slots to all choices, in the order described above. An expert has `capacity` slots per
// routing group. Each rank has `local` experts, and `held` rows of the buffer per expert. Each
// block processes one routing group and one expert.
// Launch: block_per_row
__global__ void __launch_bounds__(256)
slots_of(const long long* choices, long long* slots, int tokens, int top_k, int count, int local,
         int capacity, int held)
{
    const long long group = blockIdx.x / count, expert = blockIdx.x % count;
    const long long row = expert / local * held + group * capacity;
    int place = 0;
    for (int start = 0; start < tokens * top_k; start += blockDim.x) {
        const int at = start + threadIdx.x, choice = at / tokens, token = at % tokens;
        const long long where = (group * tokens + token) * top_k + choice;
        const bool mine = choice < top_k && choices[where] == expert;
        int found;
        const long long my_place = place + block_sum_before(mine, found);
        place += found;
        if (mine)
            slots[where] = my_place < capacity ? (row + my_place) * local + expert % local : -1;
    }
}

// Count how many of the `size` choices select each expert (chosen), and how many of these have a
// slot (kept). Each block processes one expert.
// Launch: block_per_row
__global__ void __launch_bounds__(256) load_of(const long long* choices, const long long* slots,
                                               long long* chosen, long long* kept, int size)
{
    const long long expert = blockIdx.x;
    const int all = number_of(size, [&](int i) { return choices[i] == expert; });
    const int some = number_of(size, [&](int i) { return choices[i] == expert && slots[i] >= 0; });
    if (threadIdx.x == 0) {
        chosen[expert] = all;
        kept[expert] = some;
    }
}

// grad += E times the number of choices of an expert, minus the number of all choices. Each block
// processes one expert.
// Launch: block_per_row; reads and writes grad
__global__ void __launch_bounds__(256) add_excess(float* grad, const long long* choices, int size)
{
    const long long expert = blockIdx.x;
    const int found = number_of(size, [&](int i) { return choices[i] == expert; });
    if (threadIdx.x == 0)
        grad[expert] += static_cast<float>(1LL * gridDim.x * found - size);
}

// takers [slots] = index of the choice to which the slot is assigned. The entries of empty slots
// are not changed.
// Launch: strided
__global__ void __launch_bounds__(256)
takers_of(const long long* slots, long long* takers, long long size)
{
    const long long first = blockIdx.x * 256LL + threadIdx.x;
    for (long long choice = first; choice < size; choice += gridDim.x * 256LL)
        if (slots[choice] >= 0)
            takers[slots[choice]] = choice;
}

// Copy the row of x of each token to its slots in out, and fill empty slots with zeros. Each block
// processes one slot.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
dispatch(const T* x, const long long* takers, T* out, int top_k, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x, taker = takers[row];
    const T* found = taker >= 0 ? x + taker / top_k * columns : nullptr;
    out += row * columns;
    packs_of_row<N>(columns, aligned(found, out), [&](int c, auto pack) {
        auto a = pack.zeros();
        if (found)
            a = pack.load(found + c);
        pack.store(out + c, a);
    });
}

// out = sum of the rows of y in the slots of a token, each multiplied by its weight unless
// `weights` is null. Each block processes one token.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
combine(const T* y, const long long* slots, const float* weights, T* out, int top_k, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x;
    out += row * columns, slots += row * top_k, weights = weights ? weights + row * top_k : weights;
    packs_of_row<N>(columns, columns % N == 0 && aligned(y, out), [&](int c, auto pack) {
        auto sum = pack.zeros();
#pragma unroll 1
        for (int choice = 0; choice < top_k; choice++) {
            const long long slot = slots[choice];
            if (slot < 0)
                continue;
            const auto a = pack.load(y + slot * columns + c);
            const float weight = weights ? weights[choice] : 1;
#pragma unroll
            for (int i = 0; i < pack.size; i++)
                sum[i] += weight * a[i];
        }
        pack.store(out + c, sum);
    });
}

// For each assigned slot: out = weight times the token's row of dout, and dweight = dot product of
// this row and the row of y. Empty slots of out are filled with zeros. Each block processes one
// slot.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
combine_grad(const T* dout, const T* y, const long long* takers, const float* weights, T* out,
             float* dweights, int top_k, int columns)
{
    constexpr int N = WIDTH<T>;
    const long long row = blockIdx.x, taker = takers[row];
    const T* grad = taker >= 0 ? dout + taker / top_k * columns : nullptr;
    const float weight = taker >= 0 ? weights[taker] : 0;
    y += row * columns, out += row * columns;
    float sum = 0;
    packs_of_row<N>(columns, aligned(grad, y, out), [&](int c, auto pack) {
        auto d = pack.zeros();
        if (grad) {
            const auto a = pack.load(y + c);
            d = pack.load(grad + c);
#pragma unroll
            for (int i = 0; i < pack.size; i++) {
                sum += d[i] * a[i];
                d[i] *= weight;
            }
        }
        pack.store(out + c, d);
    });
    sum = block_sum(sum);
    if (grad && threadIdx.x == 0)
        dweights[taker] = sum;
}

// losses [2, rows]: balance * sum of f p over the experts, with the shares f of the row's
// sequence, and z lse^2. Row r is token first + r of the sequences. Each block processes one row.
// Launch: block_per_row
__global__ void __launch_bounds__(256)
router_loss(const float* probs, const float* lse, const float* shares, float* losses,
            long long first, int tokens, float balance, float z, int count)
{
    const long long row = blockIdx.x;
    probs += row * count, shares += (first + row) / tokens * count;
    float sum = 0;
    for (int c = threadIdx.x; c < count; c += blockDim.x)
        sum += shares[c] * probs[c];
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        losses[row] = balance * sum;
        losses[gridDim.x + row] = z * lse[row] * lse[row];
    }
}

// Compute dlogits, the gradient of these losses times `scale`, plus the gradient through the
// weights: p (dp - sum(p dp) + 2 z scale lse), with dp = balance scale f, plus dweight if top_k =
// 1; if top_k > 1, also + w (dw - sum(w dw)), because w is the softmax of the selected logits.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(256)
route_grad(const float* dweights, const long long* experts, const float* weights,
           const float* probs, const float* lse, const float* shares, const float* scale,
           T* dlogits, long long first, int tokens, float balance, float z, int count, int top_k)
{
    const long long row = blockIdx.x;
    dweights += row * top_k, experts += row * top_k, weights += row * top_k;
    probs += row * count, dlogits += row * count, shares += (first + row) / tokens * count;
    const float factor = balance * *scale, slope = 2 * z * *scale * lse[row];
    const auto dp = [&](int c) {
        return factor * shares[c] + (top_k == 1 && experts[0] == c ? dweights[0] : 0);
    };
    float mean = 0, weighted = 0;
    for (int c = threadIdx.x; c < count; c += blockDim.x)
        mean += probs[c] * dp(c);
    mean = block_sum(mean);
    for (int choice = 0; choice < top_k; choice++)
        weighted += weights[choice] * dweights[choice];
    for (int c = threadIdx.x; c < count; c += blockDim.x) {
        float d = probs[c] * (dp(c) - mean + slope);
        for (int choice = 0; choice < top_k && top_k > 1; choice++)
            if (experts[choice] == c)
                d += weights[choice] * (dweights[choice] - weighted);
        put(dlogits[c], d);
    }
}
