#pragma once
// Groups of 128 values of a row to e4m3fn, with one scale each.
//
// scale = max(max, 1e-10) / 448; q = x / scale, to nearest even, saturating.
// Parameter: IS_UE8M0 (0 or 1): scales are rounded up to powers of two.

#include "block_max.cuh"
#include "half.cuh"
#include "to_e4m3fn.cuh"

constexpr unsigned FP8_GROUP = 128;

// The smallest power of two that is not below `scale`, from 2^-126 to 2^127.
__device__ __forceinline__ float ceil_to_power(float scale) {
    const unsigned bits = __float_as_uint(scale);
    const unsigned exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
    return __uint_as_float(min(max(exponent, 1u), 254u) << 23);
}

// The codes of a lane's WORDS pairs of 16-bit values, and the scale of their group, which 64 / WORDS neighbouring lanes
// hold. Of a group that is not all finite: NaN, with any codes.
template <unsigned WORDS>
__device__ __forceinline__ float quantize_group(const unsigned (&words)[WORDS], unsigned (&codes)[WORDS / 2]) {
    constexpr unsigned LANES = FP8_GROUP / 2 / WORDS;
    const unsigned lanes = LANES == 32 ? ~0u : ((1u << LANES % 32) - 1) << threadIdx.x % 32 / LANES * LANES;
    float value[2 * WORDS], largest = 0.0f;
#pragma unroll
    for (unsigned i = 0; i < 2 * WORDS; ++i) {
        value[i] = widen(static_cast<unsigned short>(words[i / 2] >> i % 2 * 16));
        largest = fmaxf(largest, finite_or_infinite(value[i]));
    }
#pragma unroll
    for (unsigned step = LANES / 2; step > 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(lanes, largest, step));
    }
    float scale = __fdiv_rn(fmaxf(largest, 1e-10f), 448.0f);
    if constexpr (IS_UE8M0) {
        scale = ceil_to_power(fmaxf(scale, 1e-10f));
    }
    const Divisor by(scale);
#pragma unroll
    for (unsigned i = 0; i < WORDS / 2; ++i) {
        const float *four = value + 4 * i;
        codes[i] = to_e4m3fn_pair(by.quotient(four[0]), by.quotient(four[1])) |
                   to_e4m3fn_pair(by.quotient(four[2]), by.quotient(four[3])) << 16;
    }
    return or_nan(scale, largest);
}
