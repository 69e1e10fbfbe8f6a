// The two conversions of IEEE 754's binary16 that the kernels use.
#pragma once

#include <math.h>

struct __half {
    unsigned short bits;
};

inline float __half2float(__half value)
{
    const int exponent = value.bits >> 10 & 31, fraction = value.bits & 1023;
    const float special = fraction ? NAN : INFINITY;
    const float size = exponent == 31 ? special
                       : exponent     ? ldexpf(1024 + fraction, exponent - 25)
                                      : ldexpf(fraction, -24);
    return value.bits >> 15 ? -size : size;
}

// Round to nearest, ties to even.
inline __half __float2half(float value)
{
    const unsigned short sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value))
        return {0x7fff};
    if (fabsf(value) >= 65520)
        return {static_cast<unsigned short>(sign | 0x7c00)};
    const int exponent = value == 0 ? -14 : fmax(ilogbf(value), -14);
    const int units = nearbyintf(ldexpf(fabsf(value), 10 - exponent));
    return {static_cast<unsigned short>(sign | (((exponent + 14) << 10) + units))};
}
