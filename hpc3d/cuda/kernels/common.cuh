// What all kernels share: three types of numbers, loads of 16 bytes, sums over a block.
//
// A kernel is a template over T: float, __half or __nv_bfloat16.  Arrays of T are read 16 bytes at
// a time, all arithmetic is in float, and results are rounded once, when they are stored.
// Matrices lie row by row.  hpc3d/model/launches.py says how each kernel is launched.
//
// No kernel adds atomically: sums that go over blocks are made in two passes, in a fixed order, so
// that the same numbers always give the same bits.  What changes from step to step (factors of the
// optimizer, keys of dropout) is read from device memory, so that a recorded step can be replayed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The elements of T in 16 bytes, the most that a thread loads with one instruction.
template <typename T>
constexpr int WIDTH = 16 / sizeof(T);

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ inline void put(float& place, float value) { place = value; }
__device__ inline void put(__half& place, float value) { place = __float2half(value); }
__device__ inline void put(__nv_bfloat16& place, float value) { place = __float2bfloat16(value); }

// The value as it is after a store and a load.
template <typename T>
__device__ float rounded(float value)
{
    T stored;
    put(stored, value);
    return to_float(stored);
}

// N neighboring elements, in registers.
template <int N>
struct Pack {
    float item[N];
    __device__ float& operator[](int i) { return item[i]; }
    __device__ float operator[](int i) const { return item[i]; }
};

// Whether all addresses divide by 16; null, of what is not there, does.
template <typename... T>
__device__ bool aligned(const T*... pointers)
{
    return ((reinterpret_cast<size_t>(pointers) % 16 == 0) && ...);
}

// How a thread handles N neighboring elements: 16 bytes at a time, from an aligned address on; a
// single one anywhere.
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

// body(c, pack) for all of `size` elements: the first `head` one by one, then packs of N as long
// as they are whole, then one by one again.  This thread has number `first` of each, and every
// `step`-th from there on.
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

// Those of rows, shared by the threads of a block; `wide` says that all of them begin aligned.
template <int N, typename Body>
__device__ void packs_of_row(int columns, bool wide, Body body)
{
    packs<N, int>(columns, wide ? 0 : columns, threadIdx.x, blockDim.x, body);
}

// Those of one row that is alone: it may begin anywhere, its packs begin where it is aligned.
template <typename T, typename Body>
__device__ void packs_of_row(int columns, const T* row, Body body)
{
    const int head = (16 - reinterpret_cast<size_t>(row) % 16) % 16 / sizeof(T);
    packs<WIDTH<T>, int>(columns, head, threadIdx.x, blockDim.x, body);
}

// Those of flat arrays, shared by all threads of the grid.
template <int N, typename Body>
__device__ void packs_of_grid(long long size, bool wide, Body body)
{
    const long long threads = blockDim.x, step = gridDim.x * threads;
    packs<N>(size, wide ? 0 : size, blockIdx.x * threads + threadIdx.x, step, body);
}

// N elements of which only the first `left` are there: the others are read as 0.  `wide` says that
// they lie at an aligned address; all of them are there then.
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

// body(pack) for N columns that a thread keeps over many rows; nothing where none is left.  `wide`
// says that all rows are aligned and divide into packs.
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

// NaN where one of the two is NaN: what is not finite must be seen.
struct Max {
    template <typename V>
    static __device__ V start() { return minus_infinity(); }
    template <typename V>
    static __device__ V of(V a, V b) { return a > b || a != a ? a : b; }
};

// Over the 32 threads of a warp, the same in each of them: a butterfly of five exchanges.
template <typename Of, typename V>
__device__ V warp_all(V value)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = Of::of(value, __shfl_xor_sync(0xffffffff, value, distance));
    return value;
}

// Over all threads of a one-dimensional block of whole warps, the same in each of them.
template <typename Of, typename V>
__device__ V block_all(V value)
{
    __shared__ V parts[32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_all<Of>(value);
    __syncthreads();  // the parts of the last call are read
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

// Sums over rows: the grid is (tiles of columns, strips of rows), a block 32 x 8 threads.  Thread
// (x, y) has summed N columns over every eighth row of its strip; the eight are added here, and the
// sums of the strip go to `to`, a row of `columns`.
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
    __syncthreads();  // the tile may be filled again
}
