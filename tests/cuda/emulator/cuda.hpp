// The part of CUDA C++ that the kernels use, as plain C++ for one thread of the host.
//
// Each thread of a block is a fiber, which runs without interruption until the next barrier or
// exchange (machine.cpp). The code is compiled with -fsanitize=thread, and machine.cpp implements the
// hooks of this sanitizer, so it checks every memory access.
#pragma once

#include <math.h>
#include <stddef.h>
#include <string.h>

#include <utility>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
};

// Built-in variables of the running thread.
struct Here {
    dim3 grid, block, place, thread;
};
extern Here here;
#define gridDim (here.grid)
#define blockDim (here.block)
#define blockIdx (here.place)
#define threadIdx (here.thread)

using uint4 = unsigned __attribute__((vector_size(16)));  // one access of 16 bytes, as on a GPU

void barrier(int line);
unsigned long long exchange(unsigned mask, unsigned long long bits, int distance, int line);
#define __syncthreads() barrier(__LINE__)
#define __shfl_xor_sync(mask, value, distance) shuffled(mask, value, distance, __LINE__)

template <typename V>
V shuffled(unsigned mask, V value, int distance, int line)
{
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(mask, bits, distance, line);
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline float __int_as_float(int bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned __float_as_uint(float value)
{
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return static_cast<unsigned __int128>(a) * b >> 64;
}

// Register a kernel under its name; `arguments` point to the values, as in cuLaunchKernel.
using Run = void (*)(void** arguments);
void add_kernel(const char* name, Run run);

#define UNSEEN __attribute__((no_sanitize("thread")))  // work of the driver on a GPU

template <auto kernel, typename... Types, size_t... Numbers>
UNSEEN void call(void (*)(Types...), void** arguments, std::index_sequence<Numbers...>)
{
    kernel(*static_cast<Types*>(arguments[Numbers])...);
}

template <auto kernel, typename... Types>
std::index_sequence_for<Types...> numbers(void (*)(Types...));

template <auto kernel>
struct Registered {
    explicit Registered(const char* name)
    {
        add_kernel(name, [](void** arguments) UNSEEN {
            call<kernel>(kernel, arguments, decltype(numbers<kernel>(kernel)){});
        });
    }
};
