#pragma once
// e2m1 codes. A word holds pairs (nibble i, nibble i + 4): fragments k, k + 8 of column block 0, then of block 1.

#include "formats/codes.cuh"

template <>
struct Numbers<E2M1> {
    static constexpr int SHIFT = IS_BF16 ? 126 : 14;

    // A code becomes the 16-bit float with the same exponent and fraction bits, subnormal numbers included.
    template <class Group>
    __device__ __forceinline__ static void load(unsigned (&v)[4], const Words &codes, const Group &, int j) {
        const unsigned q = codes.words[j];
        if constexpr (IS_BF16) {
            // A code at bits 3..0 (7..4), multiplied: its sign at bit 15 and, from the copy six bits lower, its
            // magnitude at bits 8..6. One instruction for both shifts, and not on the pipe of the masks.
            constexpr unsigned LOW = 0x000F000Fu, HIGH = 0x00F000F0u, SIGN_AND_MAGNITUDE = 0x81C081C0u;
            constexpr unsigned FROM_LOW = 1u << 12 | 1u << 6, FROM_HIGH = 1u << 8 | 1u << 2;
            const unsigned r = q >> 8;
            v[0] = (q & LOW) * FROM_LOW & SIGN_AND_MAGNITUDE;
            v[1] = (q & HIGH) * FROM_HIGH & SIGN_AND_MAGNITUDE;
            v[2] = (r & LOW) * FROM_LOW & SIGN_AND_MAGNITUDE;
            v[3] = (r & HIGH) * FROM_HIGH & SIGN_AND_MAGNITUDE;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned placed = q << (12 - 4 * i);
                v[i] = (placed & 0x80008000u) | (placed >> 3 & 0x0E000E00u);
            }
        }
    }
};
