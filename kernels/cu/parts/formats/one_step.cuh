#pragma once
// Integers whose scales are small enough that one multiply-add makes the weight of a code: (q - offset) * s,
// rounded once.
//
// Exponents 0 and 1 of bf16 have one ulp, so that the eight lowest bits of such a number count 2^-133: a code there
// is already a number, and one four bits higher counts 2^-129. `times` is the scale times the missing power of two,
// `minus` the scale times minus the offset; both are exact.

#include "formats/codes.cuh"
#include "mma.cuh"

// The scales of one group of k: a word's halves are of column 16j + lane / 4 and of 8 columns further.
struct OneStepScales {
    unsigned times[FRAGMENTS];      // of codes four bits higher (BITS 4), of bytes (BITS 8)
    unsigned times_low[FRAGMENTS];  // of codes in the lowest bits (BITS 4)
    unsigned minus[FRAGMENTS];

    __device__ __forceinline__ void set(int j, unsigned scales) {
        // 2^129 and 2^133 exceed bf16, but each is a product of two bf16 numbers.
        const unsigned s_127 = mul2(scales, Half::power(127));
        const unsigned s_133 = mul2(s_127, Half::power(6));
        if constexpr (BITS == 8) {
            times[j] = s_133;
        } else {
            times[j] = mul2(s_127, Half::power(2));
            if constexpr (SCALES == BITS16_BELOW_32ND) {
                times_low[j] = s_133;
            }
        }
        minus[j] = mul2(scales, Half::negative(Half::integer(BITS == 8 ? 128 : 8)));
    }

    // A pair of codes of column block HIGH.
    template <int HIGH>
    __device__ __forceinline__ static unsigned times_code(unsigned codes, unsigned times, unsigned minus) {
        return fma2(codes, half_of<HIGH>(times), half_of<HIGH>(minus));
    }

    // The weights of fragment j. Codes are placed in words as in int4.cuh and uint8b128.cuh.
    __device__ __forceinline__ void weights(unsigned (&a)[4], const Words &codes, int j) const {
        if constexpr (BITS == 4) {
            constexpr unsigned LOW = 0x000F000Fu, HIGH = 0x00F000F0u;
            const unsigned q = codes.words[j], r = q >> 8;
            if constexpr (SCALES == BITS16_BELOW_32ND) {
                a[0] = times_code<0>(q & LOW, times_low[j], minus[j]);
                a[1] = times_code<1>(r & LOW, times_low[j], minus[j]);
            } else {
                a[0] = times_code<0>(sixteen_times(q) & HIGH, times[j], minus[j]);
                a[1] = times_code<1>(sixteen_times(r) & HIGH, times[j], minus[j]);
            }
            a[2] = times_code<0>(q & HIGH, times[j], minus[j]);
            a[3] = times_code<1>(r & HIGH, times[j], minus[j]);
        } else {
            constexpr unsigned EVEN_BYTES = 0x00FF00FFu, ODD_BYTES = 0x4341;  // the latter for __byte_perm
            const unsigned q0 = codes.words[2 * j], q1 = codes.words[2 * j + 1];
            a[0] = times_code<0>(q0 & EVEN_BYTES, times[j], minus[j]);
            a[1] = times_code<1>(q1 & EVEN_BYTES, times[j], minus[j]);
            a[2] = times_code<0>(__byte_perm(q0, 0, ODD_BYTES), times[j], minus[j]);
            a[3] = times_code<1>(__byte_perm(q1, 0, ODD_BYTES), times[j], minus[j]);
        }
    }
};
