// Cross-entropy of logits [rows, columns]: -log softmax(logits)[target].
//
// If the vocabulary is sharded over ranks, the forward pass consists of row_max, a maximum over
// ranks, local_sums, a sum over ranks, and negative_log. The backward pass is softmax_grad.
// `index` is the target minus the first column of this rank. If the vocabulary is not sharded,
// cross_entropy computes both. Unlike the NumPy implementations, row_max and local_sums do not
// change the logits, and the backward pass recomputes the exponentials, which avoids rounding them
// to 16 bits and writes less data. Each block processes one row, and each thread every blockDim-th
// pack of its columns.
#include "common.cuh"

constexpr long long IGNORE = -100;  // target that excludes a row from the loss

// top [rows] = maximum of each row. Columns from `valid` on are padding and are set to -infinity.
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

// sums [2, rows]: the sum of exp(logit - top) over the columns, and logit[index] - top, or 0 if
// the target is on another rank.
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

// loss = sum of log(sums[0]) - sums[1] over the valid rows, in double precision. One block.
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

// score [2]: the result of negative_log, and the number of valid rows whose target has the largest
// logit. One block.
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

// Overwrite a row of logits with factor exp(logit - top), or 0 from column `valid` on, and
// subtract `scale` from column `at`.
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

// Overwrite the logits with scale (softmax - onehot) in valid rows, and with 0 in all other rows.
// `total` contains the sums over all ranks.
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

// Compute loss [rows], and overwrite the logits with its gradient times `scale`. One pass computes
// the maximum and the sum: if the maximum increases, the sum is rescaled (arXiv:1805.02867).
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
    sum = block_sum(sum ? sum * expf(top - most) : 0);  // also a barrier between reads and writes
    if (threadIdx.x == 0)
        loss[row] = target == IGNORE ? 0 : logf(sum) + most - wanted;
    row_softmax_grad(mine, most, weight / sum, target, weight, columns, vocabulary);
}
