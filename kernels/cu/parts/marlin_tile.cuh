// Marlin's weight layout, word by word: which values stand in a word, and where in W[K, N] they are.
//
//   BITS      4 or 8
//   IS_A_8BIT 0: 16-bit activations, 1: 8-bit activations (another matrix unit, another tile)

#if !defined(BITS) || !defined(IS_A_8BIT)
#error "BITS and IS_A_8BIT must be defined"
#endif
#if BITS != 4 && BITS != 8
#error "BITS must be 4 or 8"
#endif

#define PACK (32 / BITS)
#define MASK ((1u << BITS) - 1u)

#if IS_A_8BIT
// Two neighbouring 32 x 16 tiles are stored together: 1024 values.
#define TILE_K 32
#define TILE_N 32
#else
#define TILE_K 16
#define TILE_N 64
#endif
#define TILE_WORDS (1024 / PACK)

// Which of the values that one (lane, column block) owns sits at position p of a word: the order
// in which the kernel's bit tricks unpack them.
__device__ __forceinline__ unsigned value_at(unsigned p) {
#if IS_A_8BIT && BITS == 4
    return (p & 1u) * 4u + (p >> 1);  // 0 4 1 5 2 6 3 7
#elif IS_A_8BIT
    return p;  // 0 1 2 3
#elif BITS == 4
    return (p & 3u) * 2u + (p >> 2);  // 0 2 4 6 1 3 5 7
#else
    return (p & 1u) * 2u + (p >> 1);  // 0 2 1 3
#endif
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
#if IS_A_8BIT
        // v counts (j, block, r) with 2, 2 and 8 values; k goes 0 1 2 3 16 17 18 19.
        const unsigned j = v / 16, block = v / 8 % 2, r = v % 8;
        const unsigned k = k0 + lane % 4 * 4 + r % 4 + r / 4 * 16;
#else
        // v counts (j, block, r) with 4, 2 and 4 values; k goes 0 1 8 9.
        const unsigned j = v / 8, block = v / 4 % 2, r = v % 4;
        const unsigned k = k0 + lane % 4 * 2 + r % 2 + r / 2 * 8;
#endif
        packed |= code(k, n0 + j * 16 + block * 8 + lane / 4) << (p * BITS);
    }
    return packed;
}
