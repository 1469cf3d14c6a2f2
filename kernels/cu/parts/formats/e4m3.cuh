#pragma once
// e4m3 codes. One word for each column block; its bytes hold k + 0, 8, 1, 9.

#include "formats/codes.cuh"

template <>
struct Numbers<E4M3> {
    static constexpr int SHIFT = IS_BF16 ? 120 : 8;

    // A code in the upper bits of each half of q, as the 16-bit float with the same exponent and fraction bits,
    // subnormal numbers included.
    __device__ __forceinline__ static unsigned place(unsigned q) {
        return (q & 0x80008000u) | (IS_BF16 ? q >> 4 & 0x07F007F0u : q >> 1 & 0x3F803F80u);
    }

    template <class Group>
    __device__ __forceinline__ static void load(unsigned (&v)[4], const Words &codes, const Group &, int j) {
        const unsigned q0 = codes.words[2 * j], q1 = codes.words[2 * j + 1];
        v[0] = place(q0 << 8);
        v[1] = place(q0);
        v[2] = place(q1 << 8);
        v[3] = place(q1);
    }
};
