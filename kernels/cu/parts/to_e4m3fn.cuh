#pragma once
// f32 to e4m3fn, to nearest even, saturating.

// In integer arithmetic: the instruction exists only from sm_89 on.
__device__ __forceinline__ unsigned char to_e4m3fn(float value) {
    const unsigned bits = __float_as_uint(value);
    const unsigned sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    unsigned code;
    if (magnitude < 0x3c800000u) {
        // Below 2^-6: multiples of 2^-9. The product is exact; 8 of them are the least normal number.
        code = static_cast<unsigned>(rintf(__fmul_rn(__uint_as_float(magnitude), 512.0f)));
    } else {
        // Adds half a unit of the last place kept, less one where that place is even; then the exponent's bias.
        const unsigned rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
        code = min((rounded >> 20) - (120u << 3), 0x7eu);
    }
    return static_cast<unsigned char>(sign | code);
}

// Of two finite numbers, the first in the low byte.
__device__ __forceinline__ unsigned to_e4m3fn_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return to_e4m3fn(low) | static_cast<unsigned>(to_e4m3fn(high)) << 8;
#endif
}

// Quotients by a scale between 2^-43 and 2^127.
struct Divisor {
    float divisor, reciprocal;

    Divisor() = default;
    __device__ __forceinline__ explicit Divisor(float divisor) : divisor(divisor), reciprocal(__frcp_rn(divisor)) {}

    // x / divisor up to 2^10, correctly rounded: the second step corrects a quotient that is off by less than a unit of the
    // last place, with the correctly rounded reciprocal (Markstein). Below 2^-11, where e4m3fn has 0, the quotient may have
    // another number of that size. The sign is that of x, zero included.
    __device__ __forceinline__ float quotient(float x) const {
        const float q = __fmul_rn(x, reciprocal);
        const float near = __fmaf_rn(__fmaf_rn(-divisor, q, x), reciprocal, q);
        return copysignf(__fmaf_rn(__fmaf_rn(-divisor, near, x), reciprocal, near), x);
    }
};
