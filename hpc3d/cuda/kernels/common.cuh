// Code shared by all kernels: number types, 16-byte loads, and reductions over a thread block.
//
// A kernel is a template over T: float, __half or __nv_bfloat16. Arrays of T are read 16 bytes at
// a time, all arithmetic is in float, and results are rounded once, when they are stored. Matrices
// are row-major. hpc3d/cuda/launch_table.py contains the launch configuration of each kernel.
//
// No kernel uses atomic additions. Sums over several blocks are computed in two passes, in a fixed
// order, so that results are bitwise reproducible. Values that change from step to step (factors
// of the optimizer, dropout keys) are read from device memory, so that a captured step can be
// replayed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Number of elements of T in 16 bytes, the largest size that a thread loads with one instruction.
template <typename T>
constexpr int WIDTH = 16 / sizeof(T);

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ inline void put(float& place, float value) { place = value; }
__device__ inline void put(__half& place, float value) { place = __float2half(value); }
__device__ inline void put(__nv_bfloat16& place, float value) { place = __float2bfloat16(value); }

// Return the value rounded to type T.
template <typename T>
__device__ float rounded(float value)
{
    T stored;
    put(stored, value);
    return to_float(stored);
}

// N adjacent elements in registers.
template <int N>
struct Pack {
    float item[N];
    __device__ float& operator[](int i) { return item[i]; }
    __device__ float operator[](int i) const { return item[i]; }
};

// Return true if all addresses are multiples of 16. Null pointers (absent arrays) count as
// aligned.
template <typename... T>
__device__ bool aligned(const T*... pointers)
{
    return ((reinterpret_cast<size_t>(pointers) % 16 == 0) && ...);
}

// Access to N adjacent elements, 16 bytes at a time. The address must be aligned unless N is 1.
template <int N>
struct Whole {
    static constexpr int size = N;

    template <typename T>
    __device__ Pack<N> load(const T* from) const
    {
        Pack<N> pack;
        if constexpr (N == 1) {
            pack[0] = to_float(*from);
        } else {
#pragma unroll
            for (int start = 0; start < N; start += WIDTH<T>) {
                const uint4 bits = *reinterpret_cast<const uint4*>(from + start);
                const T* item = reinterpret_cast<const T*>(&bits);
#pragma unroll
                for (int i = 0; i < WIDTH<T>; i++)
                    pack[start + i] = to_float(item[i]);
            }
        }
        return pack;
    }

    template <typename T>
    __device__ void store(T* to, const Pack<N>& pack) const
    {
        if constexpr (N == 1) {
            put(*to, pack[0]);
        } else {
#pragma unroll
            for (int start = 0; start < N; start += WIDTH<T>) {
                uint4 bits;
                T* item = reinterpret_cast<T*>(&bits);
#pragma unroll
                for (int i = 0; i < WIDTH<T>; i++)
                    put(item[i], pack[start + i]);
                *reinterpret_cast<uint4*>(to + start) = bits;
            }
        }
    }

    __device__ Pack<N> zeros() const { return {}; }
};

// Call body(c, pack) for `size` elements: the first `head` elements one by one, then complete
// packs of N elements, then the remaining elements one by one. In each of the three ranges, this
// thread processes the item with index `first` and every `step`-th item after it.
template <int N, typename Index, typename Body>
__device__ void packs(Index size, Index head, Index first, Index step, Body body)
{
    if (size <= 0)
        return;
    if (head > size)
        head = size;
    const Index whole = head + (size - head) / N * N;
    for (Index c = first; c < head; c += step)
        body(c, Whole<1>());
    for (Index c = head + first * N; c < whole; c += step * N)
        body(c, Whole<N>());
    for (Index c = whole + first; c < size; c += step)
        body(c, Whole<1>());
}

// Process a row with the threads of a block; `wide` is true if all rows are aligned.
template <int N, typename Body>
__device__ void packs_of_row(int columns, bool wide, Body body)
{
    packs<N, int>(columns, wide ? 0 : columns, threadIdx.x, blockDim.x, body);
}

// Process a row of any alignment with the threads of a block. Packs begin at an aligned address.
template <typename T, typename Body>
__device__ void packs_of_row(int columns, const T* row, Body body)
{
    const int head = (16 - reinterpret_cast<size_t>(row) % 16) % 16 / sizeof(T);
    packs<WIDTH<T>, int>(columns, head, threadIdx.x, blockDim.x, body);
}

// Process flat arrays with all threads of the grid.
template <int N, typename Body>
__device__ void packs_of_grid(long long size, bool wide, Body body)
{
    const long long threads = blockDim.x, step = gridDim.x * threads;
    packs<N>(size, wide ? 0 : size, blockIdx.x * threads + threadIdx.x, step, body);
}

// Access to N elements of which only the first `left` exist; the others are read as 0. If `wide`
// is true, the address is aligned and all N elements exist.
template <int N>
struct Part {
    static constexpr int size = N;
    int left;
    bool wide;

    template <typename T>
    __device__ Pack<N> load(const T* from) const
    {
        if (wide)
            return Whole<N>().load(from);
        Pack<N> pack;
#pragma unroll
        for (int i = 0; i < N; i++)
            pack[i] = i < left ? to_float(from[i]) : 0;
        return pack;
    }

    template <typename T>
    __device__ void store(T* to, const Pack<N>& pack) const
    {
        if (wide)
            return Whole<N>().store(to, pack);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i < left)
                put(to[i], pack[i]);
    }
};

// Call body(pack) for N columns that a thread processes in many rows, unless no column is left.
// `wide` is true if all rows are aligned and consist of complete packs.
template <int N, typename Body>
__device__ void pack_of_columns(int left, bool wide, Body body)
{
    if (wide && left > 0)
        body(Whole<N>());
    else if (left > 0)
        body(Part<N>{left, false});
}

__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }

struct Sum {
    template <typename V>
    static __device__ V start() { return 0; }
    template <typename V>
    static __device__ V of(V a, V b) { return a + b; }
};

// Maximum that is NaN if either operand is NaN, so that non-finite values are not lost.
struct Max {
    template <typename V>
    static __device__ V start() { return minus_infinity(); }
    template <typename V>
    static __device__ V of(V a, V b) { return a > b || a != a ? a : b; }
};

// Reduce over the 32 threads of a warp by five butterfly exchanges; all threads get the result.
template <typename Of, typename V>
__device__ V warp_all(V value)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = Of::of(value, __shfl_xor_sync(0xffffffff, value, distance));
    return value;
}

// Reduce over a one-dimensional block of complete warps; all threads get the result.
template <typename Of, typename V>
__device__ V block_all(V value)
{
    __shared__ V parts[32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_all<Of>(value);
    __syncthreads();  // all threads have read the parts of the previous call
    if (lane == 0)
        parts[warp] = value;
    __syncthreads();
    return warp_all<Of>(lane < blockDim.x / 32 ? parts[lane] : Of::template start<V>());
}

template <typename V>
__device__ V block_sum(V value)
{
    return block_all<Sum>(value);
}

// Last stage of a sum over rows. The grid is (tiles of columns, strips of rows), and a block has
// 32 x 8 threads. Thread (x, y) has summed N columns over every eighth row of its strip. This
// function adds the eight partial sums, and writes the sums of the strip to `to`, a row of
// `columns`.
template <int N>
__device__ void add_eight(const Pack<N>& mine, float* to, int columns)
{
    __shared__ float tile[8][32 * N];
#pragma unroll
    for (int i = 0; i < N; i++)
        tile[threadIdx.y][threadIdx.x * N + i] = mine[i];
    __syncthreads();
    for (int k = threadIdx.y * 32 + threadIdx.x; k < 32 * N; k += 256) {
        const int column = blockIdx.x * 32 * N + k;
        float sum = 0;
        for (int y = 0; y < 8; y++)
            sum += tile[y][k];
        if (column < columns)
            to[column] = sum;
    }
    __syncthreads();  // the tile may be overwritten after this point
}
