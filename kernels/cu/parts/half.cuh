#pragma once
// f16 and bf16 as bit patterns. The parameter IS_BF16 (0 or 1) chooses the module's type, `Half`. Conversions
// round to nearest even, and every NaN becomes 0x7fff, as the instructions do it.

template <bool CONDITION, class Then, class Else>
struct Choose {
    using Type = Then;
};

template <class Then, class Else>
struct Choose<false, Then, Else> {
    using Type = Else;
};

// Constants of a 16-bit type, twice in a word: operands of arithmetic in pairs.
template <unsigned FRACTION, int BIAS>
struct HalfConstants {
    __device__ static constexpr unsigned pair(unsigned bits) { return bits << 16 | bits; }

    // 2^exponent.
    __device__ static constexpr unsigned power(int exponent) {
        return pair(static_cast<unsigned>(BIAS + exponent) << FRACTION);
    }

    // A positive integer below 2^(FRACTION + 1).
    __device__ static constexpr unsigned integer(unsigned n) {
        int exponent = 0;
        while (n >> exponent > 1) {
            ++exponent;
        }
        const unsigned fraction = (n << FRACTION >> exponent) - (1u << FRACTION);
        return power(exponent) + pair(fraction);
    }

    __device__ static constexpr unsigned negative(unsigned pair_of) { return pair_of | 0x80008000u; }
};

using F16 = HalfConstants<10, 15>;
using Bf16 = HalfConstants<7, 127>;
using Half = Choose<IS_BF16, Bf16, F16>::Type;

__device__ __forceinline__ float widen(unsigned short bits) {
    if constexpr (IS_BF16) {
        return __uint_as_float(static_cast<unsigned>(bits) << 16);
    } else {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
}

__device__ __forceinline__ unsigned short narrow(float value) {
    unsigned short bits;
    if constexpr (IS_BF16) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    }
    return bits;
}

// Two values in one word, the first in its low half.
__device__ __forceinline__ unsigned narrow2(float low, float high) {
    return static_cast<unsigned>(narrow(high)) << 16 | narrow(low);
}
