// Mixtures of experts: where tokens go, and what comes back (hpc3d/ops/routing.py).
//
// `choices` [n, top_k] are the experts of each token, `slots` [n, top_k] the rows of the experts'
// buffer that they have, or -1; a row of that belongs to one choice at most.  So rows are only ever
// gathered, and all sums have a fixed order.  A queue of a routing group has its first choices in
// the order of the tokens, then all second ones.
#include "common.cuh"

struct Largest {
    template <typename V>
    static __device__ V start() { return 0; }
    template <typename V>
    static __device__ V of(V a, V b) { return a > b ? a : b; }
};

constexpr unsigned LAST = 0x7fffffff;

// Numbers that are ordered as scores are, of equal scores by the lower expert; none is 0 or the
// largest that there is, NaN or not.
__device__ inline unsigned long long rank_of(float score, int expert)
{
    const unsigned bits = __float_as_uint(score);
    const unsigned ordered = bits >> 31 ? ~bits : bits | 0x80000000;
    return static_cast<unsigned long long>(ordered) << 32 | (LAST - expert);
}

// The softmax of a few numbers, in their place.
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

// probs = softmax(logits) of a row of `count` experts, lse = log sum exp(logits); the top_k experts
// of the largest probs (+ bias), in falling order; their weights: probs, of several the softmax of
// their logits.
// A block has a row, and a thread every blockDim-th expert.
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

// How many of the numbers below `size` suit, the same in each thread of a block.
template <typename Suits>
__device__ int number_of(int size, Suits suits)
{
    int found = 0;
    for (int i = threadIdx.x; i < size; i += blockDim.x)
        found += suits(i);
    return block_sum(found);
}

// counts [groups, E]: how many of the `size` choices of a routing group are an expert.  A block has
// one of these numbers.
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

// shares [S, E] = the sums of counts [ranks, S, groups, E] over ranks and groups, over `choices`,
// which a sequence has.  A thread has one.
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

// The sum of `value` over the threads of a warp before this one; `total` is that over all.
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

// Those over a one-dimensional block of whole warps.
__device__ inline int block_sum_before(int value, int& total)
{
    __shared__ int parts[32];
    const unsigned warp = threadIdx.x / 32;
    int before = sum_before(value, total);
    __syncthreads();  // the parts of the last call are read
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

// The slots of all choices: who comes first in the queue of a routing group has the first place.
// There are `capacity` places; `held` rows of each of `local` experts are for a rank.  A block has a
// group and an expert.
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

// Of `size` choices those that fell on an expert, and those of them that have a slot.  A block has
// an expert.
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

// grad += E times the choices that fell on an expert, less all of them.  A block has an expert.
// Launch: block_per_row; reads and writes grad
__global__ void __launch_bounds__(256) add_excess(float* grad, const long long* choices, int size)
{
    const long long expert = blockIdx.x;
    const int found = number_of(size, [&](int i) { return choices[i] == expert; });
    if (threadIdx.x == 0)
        grad[expert] += static_cast<float>(1LL * gridDim.x * found - size);
}

// takers: the number of the choice that has a slot; those of no choice stay as they are.
// Launch: strided
__global__ void __launch_bounds__(256)
takers_of(const long long* slots, long long* takers, long long size)
{
    const long long first = blockIdx.x * 256LL + threadIdx.x;
    for (long long choice = first; choice < size; choice += gridDim.x * 256LL)
        if (slots[choice] >= 0)
            takers[slots[choice]] = choice;
}

// out = the rows of x of the tokens that have a slot, zeros where none has.  A block has a slot.
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

// out = the sum over a token's choices of its slots' rows of y, each times its weight unless
// weights is null.  A block has a token.
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

// Of a slot that a choice has: out = weight times the token's row of dout, and dweight = that row
// times y's; zeros in out where none has it.  A block has a slot.
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

// losses [2, rows]: balance f p of the shares f of a row's sequence, and z lse^2.  Row r is token
// first + r of the sequences.  A block has a row.
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

// dlogits of those losses times `scale`, and of the weights, whose gradient is dweights:
// p (dp - sum(p dp) + 2 z scale lse), dp = balance scale f (+ dweight of an only choice);
// + w (dw - sum(w dw)) of several, whose weights w are the softmax of their logits.
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
