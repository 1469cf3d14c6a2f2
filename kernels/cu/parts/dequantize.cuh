// Codes of Marlin's weight layout to fragments of the matrix unit: q - z exactly, times the scale, one
// rounding. For the instructions of mma.cuh.
//
//   IS_BF16, BITS, HAS_ZERO  as in marlin_gemm.cu
//   COLUMNS                  32 or 64: columns that a warp computes, sixteen to a fragment

#if !defined(IS_BF16) || !defined(BITS) || !defined(HAS_ZERO) || !defined(COLUMNS)
#error "a parameter is missing"
#endif

#define FRAGMENTS (COLUMNS / 16)

// Where column n of 64 stands in Marlin's single order: of each 32 columns, position 8i + t takes
// column 2i + {0, 1, 8, 9, 16, 17, 24, 25}[t].
__device__ __forceinline__ unsigned single_position(unsigned n) {
    return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
}

// What a warp needs of one group of k: the scales of its lane's columns 8c + lane / 4, each twice in a
// word; and what takes the zero point off, likewise.
struct Group {
    unsigned scale[2 * FRAGMENTS];
#if HAS_ZERO
    unsigned minus[2 * FRAGMENTS];
#endif
};

// `scales` are the lane's 2 * FRAGMENTS scales, side by side.
__device__ __forceinline__ void spread(Group &group, const unsigned *scales) {
    unsigned words[FRAGMENTS];
    if (FRAGMENTS == 4) {
        *reinterpret_cast<uint4 *>(words) = *reinterpret_cast<const uint4 *>(scales);
    } else {
        *reinterpret_cast<uint2 *>(words) = *reinterpret_cast<const uint2 *>(scales);
    }
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
        group.scale[2 * j] = twice<0>(words[j]);
        group.scale[2 * j + 1] = twice<1>(words[j]);
    }
}

#if HAS_ZERO
// -(base + z), where base is what stands over the code in a word: 1024 (f16), 128 (bf16). `zeros` are
// those of eight columns, `first` the warp's first of them.
__device__ __forceinline__ void spread_zeros(Group &group, unsigned zeros, unsigned first) {
#pragma unroll
    for (int i = 0; i < 2 * FRAGMENTS; ++i) {
        const unsigned c = first + i, z = zeros >> ((c % 2 * 4 + c / 2) * 4) & 15u;
#if IS_BF16
        group.minus[i] = 0xC300C300u | z << 16 | z;
#else
        group.minus[i] = 0xE400E400u | z << 16 | z;
#endif
    }
}
#endif

// The A fragment (16 columns x 16 k) of one (lane, j): exact q - z, times the scale.
#if BITS == 4
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
        v[i] = fma2(raised, ONE, group.minus[2 * j + i / 2]);
#else
        v[i] = fma2(raised, ONE, 0xC308C308u);  // - 136
#endif
    }
#elif HAS_ZERO
    constexpr unsigned ONE = 0x3C003C00u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned raised = mask_or<0x000F000Fu, 0x64006400u>(q >> (4 * i));  // 1024 + q
        v[i] = fma2(raised, ONE, group.minus[2 * j + i / 2]);
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
    a[0] = mul2(v[0], group.scale[2 * j]);
    a[2] = mul2(v[1], group.scale[2 * j]);
    a[1] = mul2(v[2], group.scale[2 * j + 1]);
    a[3] = mul2(v[3], group.scale[2 * j + 1]);
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
    a[0] = mul2(bytes_to_pair<0, 2>(q0), group.scale[2 * j]);
    a[2] = mul2(bytes_to_pair<1, 3>(q0), group.scale[2 * j]);
    a[1] = mul2(bytes_to_pair<0, 2>(q1), group.scale[2 * j + 1]);
    a[3] = mul2(bytes_to_pair<1, 3>(q1), group.scale[2 * j + 1]);
}
#endif
