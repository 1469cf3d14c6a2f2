#pragma once
// Shared by the consumers of fp8_gemm.cu: the tiles of a product, the ring of pipeline stages in shared memory, and the
// producer that fills it.

#include "barrier.cuh"
#include "depend.cuh"
#include "fp8_gemm_sizes.cuh"
#include "run_stages.cuh"
#include "tiles.cuh"
#include "wgmma_fp8.cuh"

// Stages whose weights are copied before the last kernel is over: more would delay the first rows of x.
constexpr unsigned EARLY_STAGES = 4;

// The operands, as the kernel takes them.
struct Product {
    const float *w_scales, *x_scales;
    const unsigned short *bias;
    unsigned short *y;
    unsigned size_m, size_n, size_k, x_scale_step, tile_n, stages, raster;
    // With experts:
    const int *expert_ids;
    const int *num_tokens_post_padded;
    const int *block_rows;
    const float *row_weights;

    __device__ unsigned k_stages() const { return (size_k + STAGE_K - 1) / STAGE_K; }

    __device__ unsigned blocks() const {
        if constexpr (IS_MOE) {
            return static_cast<unsigned>(__ldcg(num_tokens_post_padded)) / ROWS;
        } else {
            return (size_m + ROWS - 1) / ROWS;
        }
    }

    // Tiles side by side.
    __device__ unsigned columns() const { return (size_n + tile_n - 1) / tile_n; }

    // Whether the second half of a tile's rows, a warpgroup's, is empty: it is neither read, multiplied nor written.
    __device__ bool is_half(unsigned row) const {
        if constexpr (HAS_MANY_ROWS) {
            return (IS_MOE ? __ldcg(block_rows + row / ROWS) : size_m - row) <= ROWS / 2;
        } else {
            return false;
        }
    }

    // Bytes of the scales of a tile's rows of x in a stage: their columns may end before the tile.
    __device__ unsigned x_scale_bytes(unsigned row) const {
        return HAS_BLOCKS && row < x_scale_step ? min(ROWS, x_scale_step - row) * 4 : 0;
    }
};

// Places in shared memory: the ring, a finished tile, scales of x, barriers.
struct Memory {
    unsigned start, stage_bytes, y_at, x_scales_at, full_at, empty_at;

    __device__ Memory(const Product &p, unsigned start)
        : start(start), stage_bytes(p.tile_n * STAGE_K + X_BYTES) {
        y_at = p.stages * stage_bytes;
        x_scales_at = y_at + END_BYTES;
        full_at = x_scales_at + p.stages * X_SCALE_BYTES;
        empty_at = full_at + p.stages * 8;
    }

    // Bytes of a stage with all rows of x, or with half of them.
    __device__ unsigned bytes(bool is_half) const { return is_half ? stage_bytes - X_BYTES / 2 : stage_bytes; }
};

// Fills the ring with the stages of all tiles of this thread block.
__device__ __forceinline__ void produce(const Product &p, const TensorMap &w_map, const TensorMap &x_map,
                                        const TensorMap &half_map, const Memory &memory) {
    const unsigned k_stages = p.k_stages();
    // No kernel writes weights: those of the first stages are copied before the last kernel is over. Which expert's they
    // are, that kernel may say.
    unsigned early = 0;
    if constexpr (!IS_MOE) {
        early = min(min(p.stages, k_stages), EARLY_STAGES);
        const Tile tile = tile_at(p, blockIdx.x, p.blocks());
        const unsigned bytes = memory.bytes(p.is_half(tile.row)) + p.x_scale_bytes(tile.row);
        for (unsigned stage = 0; stage < early; ++stage) {
            const unsigned full = memory.start + memory.full_at + stage * 8;
            barrier_expect(full, bytes);
            copy_box(memory.start + stage * memory.stage_bytes, w_map, stage * STAGE_K, tile.n0, full);
        }
    }
    wait_for_last_kernel();
    Place place;
    for_each_tile(p, [&](const Tile &tile) {
        const unsigned w_row = tile.expert * p.size_n + tile.n0, scale_bytes = p.x_scale_bytes(tile.row);
        const bool is_half = p.is_half(tile.row);
        for (unsigned stage = 0; stage < k_stages; ++stage) {
            const unsigned full = memory.start + memory.full_at + place.slot * 8;
            const unsigned to = memory.start + place.slot * memory.stage_bytes;
            if (early > 0) {
                --early;
            } else {
                barrier_wait(memory.start + memory.empty_at + place.slot * 8, place.phase ^ 1);
                barrier_expect(full, memory.bytes(is_half) + scale_bytes);
                copy_box(to, w_map, stage * STAGE_K, w_row, full);
            }
            copy_box(to + p.tile_n * STAGE_K, is_half ? half_map : x_map, stage * STAGE_K, tile.row, full);
            if (scale_bytes > 0) {
                copy_bulk(memory.start + memory.x_scales_at + place.slot * X_SCALE_BYTES,
                          p.x_scales + static_cast<size_t>(stage) * p.x_scale_step + tile.row, scale_bytes, full);
            }
            place.next(p.stages);
        }
    });
}

// The scales of W of PARTS x 128 columns: a lane has that of one part in one of 32 / PARTS stages.
template <unsigned PARTS>
struct BlockScales {
    static constexpr unsigned STAGES = 32 / PARTS;
    const float *from;
    unsigned count;
    float now, next;

    // From the tile's column n, or the last one, on.
    __device__ __forceinline__ BlockScales(const Product &p, const Tile &tile, unsigned n, unsigned lane) {
        if constexpr (HAS_BLOCKS) {
            count = p.k_stages();
            const unsigned rows = (p.size_n + STAGE_K - 1) / STAGE_K;
            const unsigned row = min((tile.n0 + n) / STAGE_K + lane % PARTS, rows - 1);
            from = p.w_scales + (static_cast<size_t>(tile.expert) * rows + row) * count;
            now = from[min(lane / PARTS, count - 1)];
            next = from[min(STAGES + lane / PARTS, count - 1)];
        }
    }

    // Before the scales of that stage; stages ascend.
    __device__ __forceinline__ void advance(unsigned stage, unsigned lane) {
        if (HAS_BLOCKS && stage % STAGES == 0 && stage > 0) {
            now = next;
            next = from[min(stage + STAGES + lane / PARTS, count - 1)];
        }
    }

    __device__ __forceinline__ float at(unsigned stage, unsigned part = 0) const {
        return HAS_BLOCKS ? __shfl_sync(~0u, now, stage % STAGES * PARTS + part) : 1.0f;
    }
};

// Adds the products of `count` stages in the unit: one chain over all of them. A stage is released while the next one's
// products run.
template <class Begin, class Release>
__device__ __forceinline__ void run_chain(unsigned count, Begin begin, Release release) {
    unsigned slot = begin(0);
    for (unsigned index = 1; index < count; ++index) {
        const unsigned next = begin(index);
        wgmma_wait<1>();
        release(slot);
        slot = next;
    }
    wgmma_wait<0>();
    release(slot);
}
