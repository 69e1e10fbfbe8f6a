// Code shared by the attention kernels.
//
// The grid is (score matrices, tiles of queries), and a block has 8 x 32 threads. Thread (x, y)
// processes one pack of queries (8 packs are 128 bytes) and every 32nd key.
#pragma once

#include "common.cuh"
#include "random.cuh"

// Keys that a query attends to: with `causal`, those up to its own position, or only the last
// `window` of them (0: no window). Queries and keys are given by their positions.
struct Band {
    int causal, window;

    __device__ bool sees(int query, int key) const
    {
        return !causal || (key <= query && (!window || key > query - window));
    }
    __device__ int first(int query) const { return window ? max(0, query - window + 1) : 0; }
};

// Score of a product x = q k^T: `scale` x or, with a soft cap, cap tanh(scale x / cap).
struct Score {
    float scale, cap, rate;

    __device__ Score(float scale, float cap) : scale(scale), cap(cap), rate(cap ? scale / cap : 0) {}
    __device__ float of(float x) const { return cap ? cap * tanhf(rate * x) : scale * x; }
    __device__ float slope(float x) const  // derivative of the score
    {
        const float t = cap ? tanhf(rate * x) : 0;
        return scale * (1 - t * t);
    }
};

// Reduce over the 32 threads with the same x; all of them get the result.
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
    __syncthreads();  // the tile may be overwritten after this point
    return all;
}
