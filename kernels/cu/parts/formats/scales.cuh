#pragma once
// Scales of one group of k as a warp holds them: those of its lane's columns 8c + lane / 4. A weight is its
// code's number times its scale, rounded once.

#include "formats/e2m1.cuh"
#include "formats/e4m3.cuh"
#include "formats/int4.cuh"
#include "mma.cuh"

// 16-bit scales, each twice in a word.
struct PairScales {
    unsigned scale[2 * FRAGMENTS];

    __device__ __forceinline__ void set(int j, unsigned scales) {
        scale[2 * j] = twice<0>(scales);
        scale[2 * j + 1] = twice<1>(scales);
    }

    // `v` are the pairs of k and k + 8 of column block 0, then of block 1.
    __device__ __forceinline__ void multiply(unsigned (&a)[4], const unsigned (&v)[4], int j) const {
        a[0] = mul2(v[0], scale[2 * j]);
        a[2] = mul2(v[1], scale[2 * j]);
        a[1] = mul2(v[2], scale[2 * j + 1]);
        a[3] = mul2(v[3], scale[2 * j + 1]);
    }
};

// With g_idx: 16-bit scales of each k. A word's halves are those of a pair of k; `scale_8` are those of the pair
// eight k further.
struct RowScales {
    unsigned scale[2 * FRAGMENTS], scale_8[2 * FRAGMENTS];

    // Of four k, each of its own group. `scales` are the lane's of group 0, side by side, `step` bytes before
    // those of the next group.
    __device__ __forceinline__ void load_rows(const unsigned char *scales, size_t step, const uint4 &groups) {
        const unsigned group_of[4] = {groups.x, groups.y, groups.z, groups.w};
        unsigned words[4][FRAGMENTS];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned char *from = scales + group_of[i] * step;
            if constexpr (FRAGMENTS == 4) {
                *reinterpret_cast<uint4 *>(words[i]) = __ldg(reinterpret_cast<const uint4 *>(from));
            } else if constexpr (FRAGMENTS == 2) {
                *reinterpret_cast<uint2 *>(words[i]) = __ldg(reinterpret_cast<const uint2 *>(from));
            } else {
                words[i][0] = __ldg(reinterpret_cast<const unsigned *>(from));
            }
        }
#pragma unroll
        for (int c = 0; c < 2 * FRAGMENTS; ++c) {
            constexpr unsigned LOW_HALVES = 0x5410, HIGH_HALVES = 0x7632;
            const unsigned halves = c % 2 ? HIGH_HALVES : LOW_HALVES;
            scale[c] = __byte_perm(words[0][c / 2], words[1][c / 2], halves);
            scale_8[c] = __byte_perm(words[2][c / 2], words[3][c / 2], halves);
        }
    }

    __device__ __forceinline__ void multiply(unsigned (&a)[4], const unsigned (&v)[4], int j) const {
        a[0] = mul2(v[0], scale[2 * j]);
        a[2] = mul2(v[1], scale_8[2 * j]);
        a[1] = mul2(v[2], scale[2 * j + 1]);
        a[3] = mul2(v[3], scale_8[2 * j + 1]);
    }
};

// 8-bit scales as 16-bit numbers: a word has a half for column 16j + lane / 4 and one for 8 columns further. They
// include the factor 2^SHIFT that the code's number lacks, unless the product exceeds a 16-bit float; then the number
// is multiplied first, exactly.
struct ByteScales {
    static constexpr int SHIFT = CODES == E2M1 ? Numbers<E2M1>::SHIFT : Numbers<E4M3>::SHIFT;
    // The factor of the number: with E8M0_WIDE half of 2^SHIFT, since the scale is doubled.
    static constexpr int FACTOR = SCALES == E8M0_WIDE ? SHIFT - 1 : SCALES == UE4M3 ? SHIFT : 0;

    unsigned scale[FRAGMENTS];

    // `pair`: a byte in each half.
    __device__ __forceinline__ void set_bytes(int j, unsigned pair) {
        if constexpr (SCALES == E8M0) {
            // 2^(b - 127 + SHIFT) by its exponent bits.
            scale[j] = pair * 0x80u + Half::pair(SHIFT << 7);
        } else if constexpr (SCALES == E8M0_WIDE) {
            // Twice 2^(b - 127), so that b = 0 is a normal number.
            scale[j] = pair * 0x80u + Half::pair(1 << 7);
        } else if constexpr (IS_BF16) {
            scale[j] = mul2(pair << 4, Half::power(120));  // the bits of e4m3 are s * 2^-120
        } else {
            scale[j] = mul2(pair << 7, Half::power(8));  // the bits of e4m3 are s * 2^-8
        }
    }

    __device__ __forceinline__ static unsigned scaled(unsigned v, unsigned scale) {
        if constexpr (FACTOR > 0) {
            v = mul2(v, Half::power(FACTOR));
        }
        return mul2(v, scale);
    }

    __device__ __forceinline__ void multiply(unsigned (&a)[4], const unsigned (&v)[4], int j) const {
        const unsigned low = half_of<0>(scale[j]), high = half_of<1>(scale[j]);
        a[0] = scaled(v[0], low);
        a[2] = scaled(v[1], low);
        a[1] = scaled(v[2], high);
        a[3] = scaled(v[3], high);
    }
};

// Zero points of one group, where codes have them.
template <bool EXIST>
struct ZeroPoints {};

template <>
struct ZeroPoints<true> {
    // -(INT4_BASE + zero point): a half for column 16j + lane / 4 and one for 8 columns further.
    unsigned minus[FRAGMENTS];

    // `zeros` are those of eight columns, `first` the warp's first of them: of columns 2j and 2j + 1 nibbles j
    // and j + 4.
    __device__ __forceinline__ void load_zeros(unsigned zeros, unsigned first) {
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j) {
            constexpr unsigned BASE = Half::negative(Half::integer(INT4_BASE));
            minus[j] = mask_or<0x000F000Fu, BASE>(zeros >> (first * 2 + j * 4));
        }
    }
};
