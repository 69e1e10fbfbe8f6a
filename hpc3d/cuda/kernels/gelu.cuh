// GELU with the tanh approximation, and its derivative.
#pragma once
#include "common.cuh"

// out = x s with s = (1 + tanh u) / 2, u = c (x + a x^3), c = sqrt(2 / pi), a = 0.044715, and d
// out / dx = s (1 + (1 - s) 2 x u'), x u' = 3 u - 2 c x (Hendrycks and Gimpel 2016, as in GPT-2).
struct Tanh {
    static __device__ float of(float x, float& slope)
    {
        const float c = 0.7978845608028654f, a = 0.044715f;
        const float u = c * x * (1 + a * x * x);
        const float s = 0.5f * (1 + tanhf(u));
        slope = s * (1 + (1 - s) * 2 * (3 * u - 2 * c * x));
        return x * s;
    }
};
