// The two conversions of bfloat16, the upper half of a float, that the kernels use.
#pragma once

#include <string.h>

struct __nv_bfloat16 {
    unsigned short bits;
};

inline float __bfloat162float(__nv_bfloat16 value)
{
    const unsigned bits = static_cast<unsigned>(value.bits) << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// Round to nearest, ties to even.
inline __nv_bfloat16 __float2bfloat16(float value)
{
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value)
        return {0x7fff};
    bits += 0x7fff + (bits >> 16 & 1);
    return {static_cast<unsigned short>(bits >> 16)};
}
