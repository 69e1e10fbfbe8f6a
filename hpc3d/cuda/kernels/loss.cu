// Cross-entropy of logits [rows, columns]: -log softmax(logits)[target].
//
// Where the vocabulary is split over ranks, a step is row_max | maximum over ranks | local_sums |
// sum over ranks | negative_log, and backward softmax_grad; index = target - first column of this
// rank.  Where it is not, cross_entropy does all of it.  Unlike their NumPy twins, the first two
// leave the logits as they are, and backward computes the exponentials again: that is exact in 16
// bits and writes less.  A block has a row, and a thread every blockDim-th pack of its columns.
#include "common.cuh"

constexpr long long IGNORE = -100;  // the target of rows that count for nothing

// The maximum of each row.  Columns from `valid` on are padding and become -infinity.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(512) row_max(T* logits, float* top, int columns, int valid)
{
    const long long row = blockIdx.x;
    T* mine = logits + row * columns;
    float most = minus_infinity();
    packs_of_row(valid, mine, [&](int c, auto pack) {
        const auto a = pack.load(mine + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            most = Max::of(most, a[i]);
    });
    for (int c = max(valid, 0) + threadIdx.x; c < columns; c += blockDim.x)
        put(mine[c], minus_infinity());
    most = block_all<Max>(most);
    if (threadIdx.x == 0)
        top[row] = most;
}

// sums [2, rows]: of exp(logit - top) over the columns; and logit[index] - top, or 0 without one.
// Launch: block_per_row
template <typename T>
__global__ void __launch_bounds__(512)
local_sums(const T* logits, const float* top, const long long* index, float* sums, int columns)
{
    const long long row = blockIdx.x, at = index[row];
    const T* mine = logits + row * columns;
    const float most = top[row];
    float sum = 0;
    packs_of_row(columns, mine, [&](int c, auto pack) {
        const auto a = pack.load(mine + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            sum += expf(a[i] - most);
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        sums[row] = sum;
        sums[gridDim.x + row] = at >= 0 && at < columns ? to_float(mine[at]) - most : 0;
    }
}

// loss = the sum over valid rows of log(sums[0]) - sums[1], in double.  One block.
// Launch: one_block
__global__ void __launch_bounds__(1024)
negative_log(const float* sums, const bool* valid, double* loss, int rows)
{
    double sum = 0;
    for (int row = threadIdx.x; row < rows; row += blockDim.x)
        if (valid[row])
            sum += logf(sums[row]) - sums[rows + row];
    sum = block_sum(sum);
    if (threadIdx.x == 0)
        *loss = sum;
}

// score = the same, and the number of valid rows whose target has the highest logit.  One block.
// Launch: one_block
__global__ void __launch_bounds__(1024)
score_rows(const float* sums, const bool* valid, double* score, int rows)
{
    double sum = 0, right = 0;
    for (int row = threadIdx.x; row < rows; row += blockDim.x)
        if (valid[row]) {
            sum += logf(sums[row]) - sums[rows + row];
            right += sums[rows + row] == 0;
        }
    sum = block_sum(sum);
    right = block_sum(right);
    if (threadIdx.x == 0) {
        score[0] = sum;
        score[1] = right;
    }
}

// In the memory of a row of logits: factor exp(logit - top), 0 from column `valid` on, minus
// `scale` at column `at`.
template <typename T>
__device__ void row_softmax_grad(T* logits, float top, float factor, long long at, float scale,
                                 int columns, int valid)
{
    packs_of_row(columns, logits, [&](int c, auto pack) {
        auto a = pack.load(logits + c);
#pragma unroll
        for (int i = 0; i < pack.size; i++) {
            const float softmax = factor && c + i < valid ? factor * expf(a[i] - top) : 0;
            a[i] = softmax - (c + i == at ? scale : 0);
        }
        pack.store(logits + c, a);
    });
}

// scale (softmax - onehot) for valid rows, 0 for others; `total` are the sums over all ranks.
// Launch: block_per_row; reads and writes logits
template <typename T>
__global__ void __launch_bounds__(512)
softmax_grad(T* logits, const float* top, const float* total, const long long* index,
             const bool* valid, const float* scale, int columns)
{
    const long long row = blockIdx.x;
    const float weight = valid[row] ? *scale : 0;
    row_softmax_grad(logits + row * columns, top[row], weight / total[row], index[row], weight,
                     columns, columns);
}

// loss [rows] and, in the logits' memory, its gradient times `scale`.  The maximum and the sum are
// found in one pass: where the maximum grows, the sum so far shrinks (arXiv:1805.02867).
// Launch: block_per_row; reads and writes logits
template <typename T>
__global__ void __launch_bounds__(512)
cross_entropy(T* logits, const long long* targets, const float* scale, float* loss, int columns,
              int vocabulary)
{
    const long long row = blockIdx.x, target = targets[row];
    T* mine = logits + row * columns;
    const float weight = target == IGNORE ? 0 : *scale;
    const float wanted = target == IGNORE ? 0 : to_float(mine[target]);
    float top = minus_infinity(), sum = 0;
    packs_of_row(vocabulary, mine, [&](int c, auto pack) {
        const auto a = pack.load(mine + c);
        float most = top;
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            most = Max::of(most, a[i]);
        sum *= top < most ? expf(top - most) : 1;
        top = most;
#pragma unroll
        for (int i = 0; i < pack.size; i++)
            sum += a[i] == minus_infinity() ? 0 : expf(a[i] - top);
    });
    const float most = block_all<Max>(top);
    sum = block_sum(sum ? sum * expf(top - most) : 0);  // also: no one writes before all have read
    if (threadIdx.x == 0)
        loss[row] = target == IGNORE ? 0 : logf(sum) + most - wanted;
    row_softmax_grad(mine, most, weight / sum, target, weight, columns, vocabulary);
}
