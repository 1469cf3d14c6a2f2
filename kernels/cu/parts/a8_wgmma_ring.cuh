#pragma once
// Shared by the warpgroups of marlin_gemm_a8_wgmma.cu: the operands, the ring of pipeline stages in shared memory, and
// the producers that fill it.

#include "a8_wgmma_sizes.cuh"
#include "barrier.cuh"
#include "depend.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

// The operands, as the kernel takes them.
struct Product {
    const unsigned char *qweight, *scales;
    const unsigned *zeros;
    const unsigned short *bias;
    const float *x_scales;
    unsigned short *y;
    unsigned size_m, size_n, size_k, tile_n, stages, raster;
    // With experts:
    const int *expert_ids;
    const int *num_tokens_post_padded;
    const float *row_weights;

    __device__ unsigned k_stages() const { return size_k / STAGE_K; }

    // Rows of scales of a matrix.
    __device__ unsigned groups() const { return GROUPS == 0 ? 1 : k_stages() * GROUPS; }

    __device__ unsigned blocks() const {
        if constexpr (IS_MOE) {
            return static_cast<unsigned>(__ldcg(num_tokens_post_padded)) / ROWS;
        } else {
            return (size_m + ROWS - 1) / ROWS;
        }
    }

    // Tiles side by side.
    __device__ unsigned columns() const { return (size_n + tile_n - 1) / tile_n; }
};

// Places in shared memory: rings of x, weights and scales, a finished tile, barriers.
struct Memory {
    unsigned start, weights_at, y_at, parts_at, scales_at, full_at, empty_at;

    __device__ Memory(const Product &p, unsigned start) : start(start) {
        weights_at = p.stages * X_BYTES;
        y_at = weights_at + p.stages * WEIGHT_BYTES;
        parts_at = y_at + Y_BYTES;
        scales_at = parts_at + PARTS_BYTES;
        full_at = scales_at + p.stages * SCALE_BYTES;
        empty_at = full_at + p.stages * 8;
    }
};

// Fills the ring with the stages of all tiles of this thread block. Four lanes of different warps do so: each copies the
// weights of 32 k of a stage and the scales of one of its groups, the first one also the rows of x.
__device__ __forceinline__ void produce(const Product &p, const TensorMap &x_map, const Memory &memory, unsigned part) {
    const unsigned k_stages = p.k_stages(), blocks = p.blocks(), tiles = blocks * p.columns();
    const size_t step = static_cast<size_t>(p.size_n) * 16, scale_step = static_cast<size_t>(p.size_n) * SCALE_SIZE;
    Place place;
    for (unsigned index = blockIdx.x; index < tiles; index += gridDim.x) {
        const Tile tile = tile_at(p, index, blocks);
        if (tile.expert < 0) {
            continue;
        }
        const unsigned columns = min(p.tile_n, p.size_n - tile.n0);
        const unsigned bytes = X_BYTES + columns * (STAGE_K / 2 + GROUPS * SCALE_SIZE);
        const unsigned char *weights = p.qweight + (static_cast<size_t>(tile.expert) * (k_stages * 4) + part) * step +
                                       static_cast<size_t>(tile.n0) * 16;
        const unsigned char *scales = p.scales + (static_cast<size_t>(tile.expert) * p.groups() + part) * scale_step +
                                      tile.n0 * SCALE_SIZE;
        for (unsigned stage = 0; stage < k_stages; ++stage) {
            const unsigned full = memory.start + memory.full_at + place.slot * 8;
            barrier_wait(memory.start + memory.empty_at + place.slot * 8, place.phase ^ 1);
            if (part == 0) {
                barrier_expect(full, bytes);
                copy_box(memory.start + place.slot * X_BYTES, x_map, stage * STAGE_K, tile.row, full);
            }
            copy_bulk(memory.start + memory.weights_at + place.slot * WEIGHT_BYTES + part * STEP_BYTES, weights,
                      columns * 16, full);
            weights += 4 * step;
            if (part < GROUPS) {
                const unsigned to = memory.scales_at + place.slot * SCALE_BYTES + part * (N_TILE * SCALE_SIZE);
                copy_bulk(memory.start + to, scales, columns * SCALE_SIZE, full);
            }
            scales += GROUPS * scale_step;
            place.next(p.stages);
        }
    }
}
