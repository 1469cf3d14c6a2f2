#pragma once
// Weight formats of 16-bit products: the types of codes and of scales, as parameters and as enumerators. Each
// file in this folder holds one dequantizer, `Numbers<CODES>`: a lane's codes to exact 16-bit numbers.

#include "formats/types.cuh"
#include "half.cuh"

constexpr unsigned BITS = CODES == UINT8B128 || CODES == E4M3 ? 8 : 4;
constexpr unsigned IS_FLOAT = CODES == E2M1 || CODES == E4M3;
constexpr unsigned HAS_ZERO = CODES == UINT4;
// Scales that allow a code to become a weight in one instruction (one_step.cuh).
constexpr unsigned IN_ONE_STEP = SCALES == BITS16_BELOW_HALF || SCALES == BITS16_BELOW_32ND;
constexpr unsigned HAS_BYTE_SCALES = SCALES == E8M0 || SCALES == E8M0_WIDE || SCALES == UE4M3;
constexpr unsigned SCALE_SIZE = HAS_BYTE_SCALES ? 1 : 2;  // bytes

static_assert(CODES <= E4M3 && SCALES <= BITS16_BELOW_32ND, "unknown codes or scales");
static_assert(IS_BF16 || (SCALES != E8M0 && SCALES != E8M0_WIDE), "f16 lacks most of e8m0's powers of two");
static_assert(!HAS_BYTE_SCALES || IS_FLOAT, "integers have 16-bit scales");
static_assert(!IN_ONE_STEP || (IS_BF16 && !IS_FLOAT && !HAS_ZERO && !HAS_G_IDX), "no such codes in one step");
static_assert(!(BITS == 8 && SCALES == BITS16_BELOW_HALF), "no such codes in one step");

// A warp computes FRAGMENTS fragments of 16 columns.
constexpr unsigned FRAGMENTS = COLUMNS / 16;
// 16-byte pieces of 16 k of one column tile of 64.
constexpr unsigned TILE_PIECES = 32 * (BITS / 4);

// A lane's codes of COLUMNS columns x 16 k: BITS / 4 words for each fragment.
struct Words {
    unsigned words[FRAGMENTS * BITS / 4];
};

__device__ __forceinline__ Words load_words(const unsigned char *from) {
    Words loaded;
    constexpr int COUNT = FRAGMENTS * BITS / 4;
    if constexpr (COUNT == 1) {
        loaded.words[0] = *reinterpret_cast<const unsigned *>(from);
    } else if constexpr (COUNT == 2) {
        *reinterpret_cast<uint2 *>(loaded.words) = *reinterpret_cast<const uint2 *>(from);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            *reinterpret_cast<uint4 *>(loaded.words + i) = *reinterpret_cast<const uint4 *>(from + i * 4);
        }
    }
    return loaded;
}

// Sets v to the numbers of fragment j, times 2^-SHIFT: the pairs of k and of k + 8 of column block 0, then of
// block 1.
template <CodeType TYPE>
struct Numbers;
