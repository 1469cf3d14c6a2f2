#pragma once
// uint8b128. One word for each column block; its bytes hold k + 0, 8, 1, 9.

#include "formats/codes.cuh"

// Bytes LOW and HIGH of q, less 128, as a pair.
template <unsigned LOW, unsigned HIGH>
__device__ __forceinline__ unsigned bytes_to_pair(unsigned q) {
    // 2^23 + q in f32; every step is exact.
    constexpr unsigned TWO_23 = 0x4B000000u;
    constexpr float MINUS = 8388608.0f + 128.0f;
    const float low = __uint_as_float(__byte_perm(q, TWO_23, 0x7440u | LOW)) - MINUS;
    const float high = __uint_as_float(__byte_perm(q, TWO_23, 0x7440u | HIGH)) - MINUS;
    unsigned r;
    if constexpr (IS_BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    }
    return r;
}

template <>
struct Numbers<UINT8B128> {
    static constexpr int SHIFT = 0;

    template <class Group>
    __device__ __forceinline__ static void load(unsigned (&v)[4], const Words &codes, const Group &, int j) {
        const unsigned q0 = codes.words[2 * j], q1 = codes.words[2 * j + 1];
        v[0] = bytes_to_pair<0, 2>(q0);
        v[1] = bytes_to_pair<1, 3>(q0);
        v[2] = bytes_to_pair<0, 2>(q1);
        v[3] = bytes_to_pair<1, 3>(q1);
    }
};
