#pragma once
// Shared by the consumers of marlin_gemm_a8_wgmma.cu: from a stage's codes to fragments, and the promotion of parts.

#include "a8_wgmma_ring.cuh"
#include "formats/a8.cuh"
#include "single_order.cuh"
#include "wgmma_fp8_registers.cuh"
#include "write_columns.cuh"

constexpr int STEPS = STAGE_K / 32;
// Parts of a stage, and the instructions of one.
constexpr int PARTS = GROUPS > 0 ? GROUPS : 1;
constexpr int PART_STEPS = STEPS / PARTS;

// A consumer warp's view of its tile.
struct WarpTile {
    unsigned lane, group;
    unsigned n;  // its first column in the tile
};

// The two scales of a lane's columns, of the group whose scales are at `from`. In Marlin's single order the scales of
// columns 2i and 2i + 1 of eight are neighbours, and those of one i follow each other.
__device__ __forceinline__ void load_scales(float (&scale)[2], const unsigned char *from, const WarpTile &warp) {
    const unsigned at = warp.n / 32 * 32 + warp.lane / 8 * 8 + warp.n % 32 / 4, odd = warp.lane / 4 % 2;
    if constexpr (IS_FLOAT) {
        const unsigned four = *reinterpret_cast<const unsigned *>(from + at) >> odd * 8;
        scale[0] = __uint_as_float((four & 0xFFu) << 23);
        scale[1] = __uint_as_float((four >> 16 & 0xFFu) << 23);
    } else {
        const uint2 pairs = *reinterpret_cast<const uint2 *>(from + at * 2);
        scale[0] = widen(static_cast<unsigned short>(pairs.x >> odd * 16));
        scale[1] = widen(static_cast<unsigned short>(pairs.y >> odd * 16));
    }
}

// The zero points of a lane's two columns, each in every byte. Those of the next group are fetched ahead.
struct Zeros {
    const unsigned *from;
    unsigned step, shift, last, fetched;
    unsigned of[2] = {0x08080808u, 0x08080808u};

    // Begins with those of group `first`.
    __device__ __forceinline__ Zeros(const Product &p, const Tile &tile, const WarpTile &warp, unsigned first) {
        if constexpr (HAS_ZERO) {
            const unsigned n = min(tile.n0 + warp.n, p.size_n - 16);
            step = p.size_n / 8;
            last = p.groups() - 1;
            from = p.zeros + static_cast<size_t>(tile.expert) * p.groups() * step + n / 64 * 8 + warp.lane / 4;
            shift = n % 64 / 8 * 4;
            fetch(first);
        }
    }

    __device__ __forceinline__ void fetch(unsigned group) {
        fetched = __ldg(from + static_cast<size_t>(min(group, last)) * step);
    }

    // Continues with those fetched last; group `next` follows.
    __device__ __forceinline__ void advance(unsigned next) {
        if constexpr (HAS_ZERO) {
            const unsigned word = fetched >> shift;
            of[0] = (word & 15u) * 0x01010101u;
            of[1] = (word >> 4 & 15u) * 0x01010101u;
            fetch(next);
        }
    }
};

// A lane's codes of a stage: of 16 columns x 32 k, two words.
struct StageCodes {
    uint2 of[STEPS];

    __device__ __forceinline__ void load(const unsigned char *from) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            of[step] = *reinterpret_cast<const uint2 *>(from + step * STEP_BYTES);
        }
    }
};

// The fragment of 32 k.
__device__ __forceinline__ void dequantize(unsigned (&a)[4], uint2 words, const Zeros &zeros) {
    using Dequantizer = Codes8<CodeType{CODES}, true>;
    a[0] = Dequantizer::numbers<0>(words.x, zeros.of[0]);
    a[1] = Dequantizer::numbers<0>(words.y, zeros.of[1]);
    a[2] = Dequantizer::numbers<1>(words.x, zeros.of[0]);
    a[3] = Dequantizer::numbers<1>(words.y, zeros.of[1]);
}

// The fragment of a step of a stage. Each part has a group of its own; where all k are one group, `zeros` is at it. Steps
// follow each other; `stride` groups after the stage's last one is that of the stage that follows.
__device__ __forceinline__ void dequantize_step(unsigned (&a)[4], const StageCodes &codes, Zeros &zeros, int step,
                                                unsigned stage, unsigned stride = 1) {
    if constexpr (GROUPS > 0) {
        if (step % PART_STEPS == 0) {
            const int part = step / PART_STEPS;
            zeros.advance(stage * GROUPS + part + (part + 1 < PARTS ? 1 : stride));
        }
    }
    dequantize(a, codes.of[step], zeros);
}

__device__ __forceinline__ void dequantize(unsigned (&a)[STEPS][4], const StageCodes &codes, Zeros &zeros, unsigned stage,
                                           unsigned stride = 1) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        dequantize_step(a[step], codes, zeros, step, stage, stride);
    }
}

// Keeps fragments in their registers up to here: products that run may still read them.
__device__ __forceinline__ void keep(const unsigned (&a)[STEPS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        asm volatile("" ::"r"(a[step][0]), "r"(a[step][1]), "r"(a[step][2]), "r"(a[step][3]));
    }
}

// Place of a matrix's column n in the bias, and in scales with one group.
__device__ __forceinline__ size_t place_of_column(const Product &p, const Tile &tile, unsigned n) {
    return static_cast<size_t>(tile.expert) * p.size_n + single_position(n);
}

// A total with a part added.
__device__ __forceinline__ float promoted(float total, float part, float scale) {
    return GROUPS > 0 ? __fmaf_rn(part, scale, total) : __fadd_rn(total, part);
}

// A total with its row's scale and its column's bias.
__device__ __forceinline__ float scaled(const Product &p, float value, float x_scale, float bias) {
    return p.bias ? __fmaf_rn(value, x_scale, bias) : __fmul_rn(value, x_scale);
}

// Adds a part, which is complete, to the totals from `at` on.
template <int TOTALS, int COUNT>
__device__ __forceinline__ void promote(float (&total)[TOTALS], int at, const float (&part)[COUNT],
                                        const float (&scale)[2]) {
    // Those of a column follow each other: its scale is then read from the registers once.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i / 2 % 2 == half) {
                total[at + i] = promoted(total[at + i], part[i], scale[half]);
            }
        }
    }
}

// The ring's stages as a consumer warp reads them.
struct Reader {
    const Product &p;
    const Memory &memory;
    const unsigned char *pointer, *weights;

    __device__ __forceinline__ Reader(const Product &p, const Memory &memory, const WarpTile &warp,
                                      const unsigned char *pointer)
        : p(p), memory(memory), pointer(pointer) {
        weights = pointer + memory.weights_at + warp.n / 32 * 512 + warp.lane * 16 + warp.n % 32 / 2;
    }

    // Waits for a stage and loads its codes.
    __device__ __forceinline__ void load(StageCodes &codes, const Place &place) const {
        barrier_wait(memory.start + memory.full_at + place.slot * 8, place.phase);
        codes.load(weights + place.slot * WEIGHT_BYTES);
    }

    __device__ __forceinline__ unsigned long long x(unsigned slot) const {
        return matrix_descriptor(memory.start + slot * X_BOX);
    }

    __device__ __forceinline__ const unsigned char *scales(unsigned slot) const {
        return pointer + memory.scales_at + slot * SCALE_BYTES;
    }

    __device__ __forceinline__ void release(unsigned slot, unsigned lane) const {
        ::release(memory.start + memory.empty_at + slot * 8, lane);
    }
};

// The scales of a part of the stage whose scales are at `from`.
__device__ __forceinline__ void load_part_scales(float (&scale)[2], const unsigned char *from, int part,
                                                 const WarpTile &warp) {
    if constexpr (GROUPS > 0) {
        load_scales(scale, from + part * (N_TILE * SCALE_SIZE), warp);
    }
}
