#pragma once
// Rows of 16-bit values to e4m3fn, with one scale each: scale = max(max / 448, 1 / (448 * 512)); q = x / scale, to nearest
// even, saturating.

#include "block_max.cuh"
#include "half.cuh"
#include "to_e4m3fn.cuh"

// Of a row whose largest magnitude is `largest`.
__device__ __forceinline__ float scale_of_row(float largest) {
    return fmaxf(__fdiv_rn(largest, 448.0f), 1.0f / (448.0f * 512.0f));
}

// The largest magnitude of a word's two values.
__device__ __forceinline__ float largest_of_word(unsigned word) {
    const float low = widen(static_cast<unsigned short>(word)), high = widen(static_cast<unsigned short>(word >> 16));
    return fmaxf(finite_or_infinite(low), finite_or_infinite(high));
}

__device__ __forceinline__ float largest_of_piece(const uint4 &eight) {
    return fmaxf(fmaxf(largest_of_word(eight.x), largest_of_word(eight.y)),
                 fmaxf(largest_of_word(eight.z), largest_of_word(eight.w)));
}

// The codes of the four values of two words.
__device__ __forceinline__ unsigned four_codes(unsigned first, unsigned second, const Divisor &scale) {
    const auto quotient = [&](unsigned word) { return scale.quotient(widen(static_cast<unsigned short>(word))); };
    return to_e4m3fn_pair(quotient(first), quotient(first >> 16)) |
           to_e4m3fn_pair(quotient(second), quotient(second >> 16)) << 16;
}
