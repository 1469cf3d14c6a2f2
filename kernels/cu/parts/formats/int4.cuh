#pragma once
// uint4b8, and uint4 with zero points. A word holds pairs (nibble i, nibble i + 4): fragments k, k + 8 of column
// block 0, then of block 1. A nibble below the bits of BASE is BASE plus the code, exactly; one multiply-add
// takes off BASE and the zero point, exactly too.

#include "formats/codes.cuh"
#include "mma.cuh"

// The power of two whose last fraction bits count single units: 1024 (f16), 128 (bf16).
constexpr unsigned INT4_BASE = IS_BF16 ? 128 : 1024;

template <CodeType TYPE>
struct Int4Numbers {
    static constexpr int SHIFT = 0;

    // With zero points, `group.minus` is -(INT4_BASE + zero point) of column blocks 0 and 1.
    template <class Group>
    __device__ __forceinline__ static void load(unsigned (&v)[4], const Words &codes,
                                                [[maybe_unused]] const Group &group, int j) {
        constexpr unsigned ONE = Half::power(0), BASE = Half::integer(INT4_BASE), LOW = 0x000F000Fu;
        const unsigned q = codes.words[j];
        if constexpr (IS_BF16 || TYPE == UINT4) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned raised = mask_or<LOW, BASE>(q >> (4 * i));
                if constexpr (TYPE == UINT4) {
                    const unsigned minus = group.minus[j];
                    v[i] = fma2(raised, ONE, i < 2 ? half_of<0>(minus) : half_of<1>(minus));
                } else {
                    v[i] = fma2(raised, ONE, Half::negative(Half::integer(INT4_BASE + 8)));
                }
            }
        } else {
            // The upper nibble of a byte counts 16 q: the division is part of the exact multiply-add.
            constexpr unsigned HIGH = 0x00F000F0u, SIXTEENTH = Half::power(-4);
            constexpr unsigned MINUS_LOW = Half::negative(Half::integer(INT4_BASE + 8));
            constexpr unsigned MINUS_HIGH = Half::negative(Half::integer(INT4_BASE / 16 + 8));
            const unsigned r = q >> 8;
            v[0] = fma2(mask_or<LOW, BASE>(q), ONE, MINUS_LOW);
            v[1] = fma2(mask_or<HIGH, BASE>(q), SIXTEENTH, MINUS_HIGH);
            v[2] = fma2(mask_or<LOW, BASE>(r), ONE, MINUS_LOW);
            v[3] = fma2(mask_or<HIGH, BASE>(r), SIXTEENTH, MINUS_HIGH);
        }
    }
};

template <>
struct Numbers<UINT4B8> : Int4Numbers<UINT4B8> {};

template <>
struct Numbers<UINT4> : Int4Numbers<UINT4> {};
