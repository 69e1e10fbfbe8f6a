// What the kernels of attention share.
//
// The grid is (matrices of scores, tiles of queries), a block 8 x 32 threads: thread (x, y) has a
// pack of queries, 8 packs are 128 bytes, and every 32nd key.
#pragma once

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
