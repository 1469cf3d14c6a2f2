#pragma once
// Marlin's weight layout, word by word: the values of a word, and their places in W[K, N].
//
// Parameters:
//   BITS      4 or 8
//   IS_A_8BIT 0: 16-bit activations, 1: 8-bit activations (another matrix unit, another tile)

static_assert(BITS == 4 || BITS == 8, "BITS must be 4 or 8");

constexpr unsigned PACK = 32 / BITS;
constexpr unsigned MASK = (1u << BITS) - 1u;
// Of 8-bit activations, two neighbouring 32 x 16 tiles are stored together: 1024 values.
constexpr unsigned TILE_K = IS_A_8BIT ? 32 : 16;
constexpr unsigned TILE_N = IS_A_8BIT ? 32 : 64;
constexpr unsigned TILE_WORDS = 1024 / PACK;

// The number, among the values of one (lane, column block), of the value at position p of a word: the order in which
// the product's kernels unpack them.
__device__ __forceinline__ unsigned value_at(unsigned p) {
    if constexpr (IS_A_8BIT && BITS == 4) {
        return (p & 1u) * 4u + (p >> 1);  // 0 4 1 5 2 6 3 7
    } else if constexpr (IS_A_8BIT) {
        return p;  // 0 1 2 3
    } else if constexpr (BITS == 4) {
        return (p & 3u) * 2u + (p >> 2);  // 0 2 4 6 1 3 5 7
    } else {
        return (p & 1u) * 2u + (p >> 1);  // 0 2 1 3
    }
}

// The packed word `word` of a matrix of size_n columns; code(k, n) gives each value.
template <typename Code>
__device__ __forceinline__ unsigned marlin_word(unsigned word, unsigned size_n, Code code) {
    // Tiles follow each other along n, then along k, so a tile's number is a plain quotient.
    const unsigned tile = word / TILE_WORDS, in_tile = word % TILE_WORDS;
    const unsigned tiles_n = size_n / TILE_N;
    const unsigned k0 = tile / tiles_n * TILE_K, n0 = tile % tiles_n * TILE_N;
    const unsigned lane = in_tile / (TILE_WORDS / 32);
    const unsigned first = in_tile % (TILE_WORDS / 32) * PACK;  // of the lane's 32 values

    unsigned packed = 0;
    for (unsigned p = 0; p < PACK; ++p) {
        const unsigned v = first + value_at(p);
        // v counts (j, block, r) with 2, 2 and 8 values, or 4, 2 and 4; k goes 0 1 2 3 16 17 18 19, or 0 1 8 9.
        constexpr unsigned COUNT = IS_A_8BIT ? 8 : 4;
        const unsigned j = v / (2 * COUNT), block = v / COUNT % 2, r = v % COUNT;
        unsigned k;
        if constexpr (IS_A_8BIT) {
            k = k0 + lane % 4 * 4 + r % 4 + r / 4 * 16;
        } else {
            k = k0 + lane % 4 * 2 + r % 2 + r / 2 * 8;
        }
        packed |= code(k, n0 + j * 16 + block * 8 + lane / 4) << (p * BITS);
    }
    return packed;
}
