// Codes of Marlin's weight layout to fragments of the matrix unit: the code's number exactly, times the
// scale, one rounding. For the instructions of mma.cuh.
//
//   IS_BF16, BITS, HAS_ZERO, IS_FLOAT, SCALE_TYPE, HAS_G_IDX  as in marlin_gemm.cu
//   COLUMNS  16, 32 or 64: columns that a warp computes, sixteen to a fragment

#if !defined(IS_BF16) || !defined(BITS) || !defined(HAS_ZERO) || !defined(IS_FLOAT) || \
    !defined(SCALE_TYPE) || !defined(HAS_G_IDX) || !defined(COLUMNS)
#error "a parameter is missing"
#endif
#if SCALE_TYPE % 2 == 1 && !IS_BF16
#error "f16 lacks most of e8m0's powers of two"
#endif
// Scales that make a weight of a code in one step.
#define IN_ONE_STEP (SCALE_TYPE == 4 || SCALE_TYPE == 5)
#if IN_ONE_STEP && (!IS_BF16 || IS_FLOAT || HAS_ZERO || HAS_G_IDX || (BITS == 8 && SCALE_TYPE == 4))
#error "no such codes in one step"
#endif

#define FRAGMENTS (COLUMNS / 16)
#define SCALE_SIZE (SCALE_TYPE == 0 || IN_ONE_STEP ? 2 : 1)  // bytes

// Where column n of 64 stands in Marlin's single order: of each 32 columns, position 8i + t takes
// column 2i + {0, 1, 8, 9, 16, 17, 24, 25}[t].
__device__ __forceinline__ unsigned single_position(unsigned n) {
    return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
}

// What a warp needs of one group of k: the scales of its lane's columns 8c + lane / 4, each twice in a
// word. With HAS_G_IDX a word's halves are the scales of a pair of k, and those of the pair eight k further
// stand apart. Words that hold 8-bit scales, what takes zero points off, or both in one step have a half for
// column 16j + lane / 4 and one for 8 further.
struct Group {
#if IN_ONE_STEP
    unsigned times[FRAGMENTS];
    unsigned minus[FRAGMENTS];
#if BITS == 4 && SCALE_TYPE == 5
    unsigned times_low[FRAGMENTS];
#endif
#elif SCALE_TYPE == 0
    unsigned scale[2 * FRAGMENTS];
#else
    unsigned scale[FRAGMENTS];
#endif
#if HAS_G_IDX
    unsigned scale_8[2 * FRAGMENTS];
#endif
#if HAS_ZERO
    unsigned minus[FRAGMENTS];
#endif
};

// A lane's codes of COLUMNS columns x 16 k: BITS / 4 words for each fragment.
struct Words {
    unsigned of[FRAGMENTS * BITS / 4];
};

__device__ __forceinline__ Words load_words(const unsigned char *from) {
    Words words;
    constexpr int COUNT = FRAGMENTS * BITS / 4;
    if constexpr (COUNT == 1) {
        words.of[0] = *reinterpret_cast<const unsigned *>(from);
    } else if constexpr (COUNT == 2) {
        *reinterpret_cast<uint2 *>(words.of) = *reinterpret_cast<const uint2 *>(from);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            *reinterpret_cast<uint4 *>(words.of + i) = *reinterpret_cast<const uint4 *>(from + i * 4);
        }
    }
    return words;
}

// `scales` are those of the lane's eight columns of 64, side by side; the warp's are part `part` of them.
__device__ __forceinline__ void spread(Group &group, const unsigned char *scales, unsigned part) {
    constexpr int WORDS = FRAGMENTS * SCALE_SIZE > 2 ? FRAGMENTS * SCALE_SIZE / 2 : 1;
    unsigned words[WORDS];
    scales += FRAGMENTS * SCALE_SIZE == 1 ? part / 2 * 4 : part * (WORDS * 4);
    if (WORDS == 4) {
        *reinterpret_cast<uint4 *>(words) = *reinterpret_cast<const uint4 *>(scales);
    } else if (WORDS == 2) {
        *reinterpret_cast<uint2 *>(words) = *reinterpret_cast<const uint2 *>(scales);
    } else {
        words[0] = *reinterpret_cast<const unsigned *>(scales);
    }
    if (FRAGMENTS * SCALE_SIZE == 1) {
        words[0] >>= part % 2 * 8;
    }
#if IN_ONE_STEP
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
        // 2^129 and 2^133 are none of bf16, but each is a product of two.
        const unsigned s_127 = mul2(words[j], 0x7F007F00u);
        const unsigned s_133 = mul2(s_127, 0x42804280u);
#if BITS == 8
        group.times[j] = s_133;
#else
        group.times[j] = mul2(s_127, 0x40804080u);
#if SCALE_TYPE == 5
        group.times_low[j] = s_133;
#endif
#endif
        group.minus[j] = mul2(words[j], BITS == 8 ? 0xC300C300u : 0xC100C100u);  // -128, -8
    }
#elif SCALE_TYPE == 0
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
        group.scale[2 * j] = twice<0>(words[j]);
        group.scale[2 * j + 1] = twice<1>(words[j]);
    }
#else
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
        // Of four columns the bytes are 0, 2, 1, 3.
        const unsigned pair =
            j % 2 ? __byte_perm(words[j / 2], 0, 0x4341) : words[j / 2] & 0x00FF00FFu;
#if SCALE_TYPE == 1
        // 2^(b - 127) with what `place` leaves out: b + 120 or b + 126 as the exponent's bits.
        group.scale[j] = pair * 0x80u + (BITS == 8 ? 0x3C003C00u : 0x3F003F00u);
#elif SCALE_TYPE == 3
        // Twice 2^(b - 127), so that b = 0 is a normal number.
        group.scale[j] = pair * 0x80u + 0x00800080u;
#elif IS_BF16
        group.scale[j] = mul2(pair << 4, 0x7B807B80u);  // s * 2^-120 as bits, times 2^120
#else
        group.scale[j] = mul2(pair << 7, 0x5C005C00u);  // s * 2^-8 as bits, times 2^8
#endif
    }
#endif
}

#if HAS_G_IDX
// Scales of four k, each of its own group: `scales` are the lane's of group 0, side by side, `step` bytes
// before those of the next.
__device__ __forceinline__ void spread_rows(Group &group, const unsigned char *scales, size_t step,
                                            const uint4 &groups) {
    const unsigned group_of[4] = {groups.x, groups.y, groups.z, groups.w};
    unsigned words[4][FRAGMENTS];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned char *of = scales + group_of[i] * step;
        if constexpr (FRAGMENTS == 4) {
            *reinterpret_cast<uint4 *>(words[i]) = __ldg(reinterpret_cast<const uint4 *>(of));
        } else if constexpr (FRAGMENTS == 2) {
            *reinterpret_cast<uint2 *>(words[i]) = __ldg(reinterpret_cast<const uint2 *>(of));
        } else {
            words[i][0] = __ldg(reinterpret_cast<const unsigned *>(of));
        }
    }
#pragma unroll
    for (int c = 0; c < 2 * FRAGMENTS; ++c) {
        const unsigned halves = c % 2 ? 0x7632 : 0x5410;
        group.scale[c] = __byte_perm(words[0][c / 2], words[1][c / 2], halves);
        group.scale_8[c] = __byte_perm(words[2][c / 2], words[3][c / 2], halves);
    }
}
#endif

#if HAS_ZERO
// -(base + z), where base is what stands over the code in a word: 1024 (f16), 128 (bf16). `zeros` are
// those of eight columns, `first` the warp's first of them: of columns 2j and 2j + 1 nibbles j and j + 4.
__device__ __forceinline__ void spread_zeros(Group &group, unsigned zeros, unsigned first) {
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
        constexpr unsigned BASE = IS_BF16 ? 0xC300C300u : 0xE400E400u;
        group.minus[j] = mask_or<0x000F000Fu, BASE>(zeros >> (first * 2 + j * 4));
    }
}
#endif

#if IS_FLOAT && (BITS == 8 || !IS_BF16)
// An 8-bit or 4-bit float in the upper bits of each half of q, as the 16-bit float with the same
// exponent and fraction bits: times the power of two that stands there, subnormal numbers included.
__device__ __forceinline__ unsigned place(unsigned q) {
#if BITS == 8 && IS_BF16
    return (q & 0x80008000u) | (q >> 4 & 0x07F007F0u);  // 2^-120
#elif BITS == 8
    return (q & 0x80008000u) | (q >> 1 & 0x3F803F80u);  // 2^-8
#else
    return (q & 0x80008000u) | (q >> 3 & 0x0E000E00u);  // 2^-14
#endif
}
#endif

#if IN_ONE_STEP
// A pair of codes less their offset, a power of two, times the scale of column block HIGH.
//
// Exponents 0 and 1 of bf16 have one ulp, so that the eight lowest bits of such a number count 2^-133: a
// code there is a number as it stands, and one four bits higher counts 2^-129. `times` is the scale times
// what that lacks, `minus` the scale times minus the offset, exactly both. So the fused multiply-add
// rounds (q - offset) * s once.
template <int HIGH>
__device__ __forceinline__ unsigned times_code(unsigned codes, unsigned times, unsigned minus) {
    return fma2(codes, half_of<HIGH>(times), half_of<HIGH>(minus));
}
#else
// A pair of numbers times their scales. Scales of floats hold the power of two that `place` leaves
// out, but where no 16-bit float holds both: then it is made up for before, exactly; by half of it
// with SCALE_TYPE 3, whose scale is twice what it stands for.
__device__ __forceinline__ unsigned scaled(unsigned v, unsigned scale) {
#if SCALE_TYPE == 3
    v = mul2(v, BITS == 8 ? 0x7B007B00u : 0x7E007E00u);  // 2^119, 2^125
#elif SCALE_TYPE == 2
    v = mul2(v, IS_BF16 ? 0x7E807E80u : 0x74007400u);  // 2^126, 2^14
#endif
    return mul2(v, scale);
}

// `v` are the pairs of k and k + 8 of column block 0, then of block 1.
__device__ __forceinline__ void scale_fragment(unsigned (&a)[4], const unsigned (&v)[4],
                                               const Group &group, int j) {
#if HAS_G_IDX
    const unsigned first[2] = {group.scale[2 * j], group.scale[2 * j + 1]};
    const unsigned second[2] = {group.scale_8[2 * j], group.scale_8[2 * j + 1]};
#elif SCALE_TYPE == 0
    const unsigned first[2] = {group.scale[2 * j], group.scale[2 * j + 1]};
    const unsigned(&second)[2] = first;
#else
    const unsigned first[2] = {half_of<0>(group.scale[j]), half_of<1>(group.scale[j])};
    const unsigned(&second)[2] = first;
#endif
    a[0] = scaled(v[0], first[0]);
    a[2] = scaled(v[1], second[0]);
    a[1] = scaled(v[2], first[1]);
    a[3] = scaled(v[3], second[1]);
}
#endif

// The A fragment (16 columns x 16 k) of one (lane, j): exact numbers, times the scale.
#if IN_ONE_STEP && BITS == 4
__device__ __forceinline__ void dequantize(unsigned (&a)[4], unsigned q, const Group &group,
                                           int j) {
    // Pairs (nibble i, nibble i + 4): fragments k, k + 8 of column block 0, then of block 1.
    const unsigned r = q >> 8;
#if SCALE_TYPE == 5
    a[0] = times_code<0>(q & 0x000F000Fu, group.times_low[j], group.minus[j]);
    a[1] = times_code<1>(r & 0x000F000Fu, group.times_low[j], group.minus[j]);
#else
    a[0] = times_code<0>(sixteen_times(q) & 0x00F000F0u, group.times[j], group.minus[j]);
    a[1] = times_code<1>(sixteen_times(r) & 0x00F000F0u, group.times[j], group.minus[j]);
#endif
    a[2] = times_code<0>(q & 0x00F000F0u, group.times[j], group.minus[j]);
    a[3] = times_code<1>(r & 0x00F000F0u, group.times[j], group.minus[j]);
}
#elif IN_ONE_STEP
// One word for each column block; its bytes hold k + 0, 8, 1, 9.
__device__ __forceinline__ void dequantize(unsigned (&a)[4], unsigned q0, unsigned q1,
                                           const Group &group, int j) {
    a[0] = times_code<0>(q0 & 0x00FF00FFu, group.times[j], group.minus[j]);
    a[1] = times_code<1>(q1 & 0x00FF00FFu, group.times[j], group.minus[j]);
    a[2] = times_code<0>(__byte_perm(q0, 0, 0x4341), group.times[j], group.minus[j]);
    a[3] = times_code<1>(__byte_perm(q1, 0, 0x4341), group.times[j], group.minus[j]);
}
#elif BITS == 4 && IS_FLOAT
__device__ __forceinline__ void dequantize(unsigned (&a)[4], unsigned q, const Group &group,
                                           int j) {
    // Pairs as below.
    unsigned v[4];
#if IS_BF16
    // As `place` does it, times 2^-126. A code at bits 3..0 (7..4), multiplied: its sign at bit 15 and,
    // from the copy six bits lower, its magnitude at bits 8..6. One instruction for both shifts, and
    // not on the pipe of the masks.
    const unsigned r = q >> 8;
    v[0] = (q & 0x000F000Fu) * 0x1040u & 0x81C081C0u;
    v[1] = (q & 0x00F000F0u) * 0x0104u & 0x81C081C0u;
    v[2] = (r & 0x000F000Fu) * 0x1040u & 0x81C081C0u;
    v[3] = (r & 0x00F000F0u) * 0x0104u & 0x81C081C0u;
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] = place(q << (12 - 4 * i));
    }
#endif
    scale_fragment(a, v, group, j);
}
#elif IS_FLOAT
// One word for each column block; its bytes hold k + 0, 8, 1, 9.
__device__ __forceinline__ void dequantize(unsigned (&a)[4], unsigned q0, unsigned q1,
                                           const Group &group, int j) {
    const unsigned v[4] = {place(q0 << 8), place(q0), place(q1 << 8), place(q1)};
    scale_fragment(a, v, group, j);
}
#elif BITS == 4
__device__ __forceinline__ void dequantize(unsigned (&a)[4], unsigned q, const Group &group,
                                           int j) {
    // Pairs (nibble i, nibble i + 4): fragments k, k + 8 of column block 0, then of block 1.
    unsigned v[4];
#if IS_BF16
    constexpr unsigned ONE = 0x3F803F80u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned raised = mask_or<0x000F000Fu, 0x43004300u>(q >> (4 * i));  // 128 + q
#if HAS_ZERO
        v[i] = fma2(raised, ONE, i < 2 ? half_of<0>(group.minus[j]) : half_of<1>(group.minus[j]));
#else
        v[i] = fma2(raised, ONE, 0xC308C308u);  // - 136
#endif
    }
#elif HAS_ZERO
    constexpr unsigned ONE = 0x3C003C00u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned raised = mask_or<0x000F000Fu, 0x64006400u>(q >> (4 * i));  // 1024 + q
        v[i] = fma2(raised, ONE, i < 2 ? half_of<0>(group.minus[j]) : half_of<1>(group.minus[j]));
    }
#else
    // The upper nibble of a byte stands for 16 q: the division is part of the exact multiply-add.
    constexpr unsigned ONE = 0x3C003C00u, SIXTEENTH = 0x2C002C00u;
    const unsigned r = q >> 8;
    v[0] = fma2(mask_or<0x000F000Fu, 0x64006400u>(q), ONE, 0xE408E408u);        // - 1032
    v[1] = fma2(mask_or<0x00F000F0u, 0x64006400u>(q), SIXTEENTH, 0xD480D480u);  // - 72
    v[2] = fma2(mask_or<0x000F000Fu, 0x64006400u>(r), ONE, 0xE408E408u);
    v[3] = fma2(mask_or<0x00F000F0u, 0x64006400u>(r), SIXTEENTH, 0xD480D480u);
#endif
    scale_fragment(a, v, group, j);
}
#else
// Bytes `low` and `high` of q, less 128, as a pair.
template <unsigned LOW, unsigned HIGH>
__device__ __forceinline__ unsigned bytes_to_pair(unsigned q) {
    // 2^23 + q in f32; every step is exact.
    const float low = __uint_as_float(__byte_perm(q, 0x4B000000u, 0x7440u | LOW)) - 8388736.0f;
    const float high = __uint_as_float(__byte_perm(q, 0x4B000000u, 0x7440u | HIGH)) - 8388736.0f;
    unsigned r;
#if IS_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}

// One word for each column block; its bytes hold k + 0, 8, 1, 9.
__device__ __forceinline__ void dequantize(unsigned (&a)[4], unsigned q0, unsigned q1,
                                           const Group &group, int j) {
    const unsigned v[4] = {bytes_to_pair<0, 2>(q0), bytes_to_pair<1, 3>(q0),
                           bytes_to_pair<0, 2>(q1), bytes_to_pair<1, 3>(q1)};
    scale_fragment(a, v, group, j);
}
#endif
