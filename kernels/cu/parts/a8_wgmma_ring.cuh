#pragma once
// Shared by the warpgroups of marlin_gemm_a8_wgmma.cu: the operands, the ring of pipeline stages in shared memory, and
// the producers that fill it.

#include "a8_wgmma_sizes.cuh"
#include "barrier.cuh"
#include "depend.cuh"
#include "few_entries.cuh"
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
    const int *block_rows;
    const float *row_weights;
    unsigned is_early;

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

// Places in shared memory: rings of x, weights and scales, a finished tile, parts, heads of tiles, barriers, the
// first tile where the entries give it. With ACTIVATES the rows of x come first, and rows to be quantized last.
struct Memory {
    unsigned start, weights_at, y_at, parts_at, heads_at, scales_at, full_at, empty_at, found_at, halves_at;

    __device__ Memory(const Product &p, unsigned start) : start(start) {
        weights_at = CODES_BYTES + p.stages * X_BYTES;
        y_at = weights_at + p.stages * WEIGHT_BYTES;
        parts_at = y_at + Y_BYTES;
        heads_at = parts_at + PARTS_BYTES;
        scales_at = heads_at + (p.stages + 1) * HEAD_BYTES;
        full_at = scales_at + p.stages * SCALE_BYTES;
        empty_at = full_at + p.stages * 8;
        found_at = empty_at + p.stages * 8;
        halves_at = found_at + FOUND_BYTES;
    }
};

// This warp's number, as a value that the compiler knows to be the same for all lanes: what depends on it may be in uniform
// registers, as the copy engine and the matrix unit take it.
__device__ __forceinline__ unsigned warp_of_block() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

// Stages of a producer whose weights are copied before the last kernel is over.
constexpr unsigned EARLY_STAGES = 2;

// The head after number `at`.
__device__ __forceinline__ unsigned next_head(const Product &p, unsigned at) { return at == p.stages ? 0 : at + 1; }

// Rows of a tile that have entries.
__device__ __forceinline__ unsigned rows_of(const Product &p, const Tile &tile) {
    if constexpr (IS_MOE) {
        return __ldcg(p.block_rows + tile.row / ROWS);
    } else {
        return min(ROWS, p.size_m - tile.row);
    }
}

// Writes head number `at`: of a tile with that many rows, or of none where its expert is negative. Precedes the arrival at
// the barrier of the tile's first stage. Returns the bytes that are copied to the head later on.
__device__ __forceinline__ unsigned write_head(const Product &p, const Memory &memory, const Tile &tile, unsigned rows,
                                               unsigned at) {
    const unsigned numbers = (ACTIVATES ? 0 : 1) + (p.row_weights ? 1 : 0);  // of each row
    const unsigned bytes = IS_MOE && tile.expert >= 0 ? ROWS * 4 * numbers : 0;
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(memory.start + memory.heads_at + at * HEAD_BYTES),
                 "r"(tile.row), "r"(tile.n0), "r"(tile.expert), "r"(rows)
                 : "memory");
    return bytes;
}

// Copies the scales and router weights of a tile's rows to its head.
__device__ __forceinline__ void copy_head(const Product &p, const Memory &memory, const Tile &tile, unsigned at,
                                          unsigned full) {
    const unsigned to = memory.start + memory.heads_at + at * HEAD_BYTES + 16;
    if constexpr (!ACTIVATES) {
        copy_bulk(to, p.x_scales + tile.row, ROWS * 4, full);
    }
    if (p.row_weights) {
        copy_bulk(to + ROWS * 4, p.row_weights + tile.row, ROWS * 4, full);
    }
}

// Copies the weights of a stage of a tile, and its scales, to a slot. `head_bytes`: copied to the tile's head as well.
__device__ __forceinline__ void copy_weights(const Product &p, const Memory &memory, const Tile &tile, unsigned stage,
                                             unsigned slot, unsigned head_bytes) {
    const unsigned columns = min(p.tile_n, p.size_n - tile.n0), full = memory.start + memory.full_at + slot * 8;
    const size_t steps = STAGE_K / 32, step = static_cast<size_t>(p.size_n) * 16;
    const unsigned char *weights = p.qweight + (static_cast<size_t>(tile.expert) * p.k_stages() + stage) * steps * step +
                                   static_cast<size_t>(tile.n0) * 16;
    const unsigned to = memory.start + memory.weights_at + slot * WEIGHT_BYTES;
    barrier_expect(full, X_BYTES + columns * (STAGE_K / 2 + GROUPS * SCALE_SIZE) + head_bytes);
#pragma unroll
    for (unsigned i = 0; i < steps; ++i) {
        copy_bulk(to + i * STEP_BYTES, weights + i * step, columns * 16, full);
    }
    const size_t scale_step = static_cast<size_t>(p.size_n) * SCALE_SIZE;
    const unsigned char *scales = p.scales + (static_cast<size_t>(tile.expert) * p.groups() + stage * GROUPS) * scale_step +
                                  tile.n0 * SCALE_SIZE;
#pragma unroll
    for (int i = 0; i < static_cast<int>(GROUPS); ++i) {
        copy_bulk(memory.start + memory.scales_at + slot * SCALE_BYTES + i * (N_TILE * SCALE_SIZE), scales + i * scale_step,
                  columns * SCALE_SIZE, full);
    }
}

// Fills every fourth stage of the ring, from `first` on, for all tiles of this thread block. Four lanes of different warps
// do so, since one alone would be slower than the consumers of small stages. The stages are counted over all tiles. Counted
// in each tile, two stages of a producer could be 7 apart. In a ring of fewer slots it would then fill a slot a pass too
// early: a barrier shows only whether its phase is even or odd. `found`: with IS_MOE, the first tile if the entries gave it.
__device__ __forceinline__ void produce(const Product &p, [[maybe_unused]] const TensorMap &x_map, const Memory &memory, unsigned first,
                                        FilledTile found) {
    constexpr unsigned STRIDE = PRODUCERS / 32;
    const unsigned k_stages = p.k_stages(), padded = (k_stages + PAIR - 1) / PAIR * PAIR;
    // No kernel writes weights. Which expert's they are, the last kernel may say.
    const bool is_placed = !IS_MOE || p.is_early;
    if (is_placed) {
        const unsigned blocks = p.blocks();
        if (!IS_MOE || blockIdx.x < blocks * p.columns()) {
            found.tile = tile_at(p, blockIdx.x, blocks);
        }
    }
    unsigned early = found.tile.expert < 0 ? 0 : min(min(p.stages, k_stages), is_placed ? STRIDE * EARLY_STAGES : p.stages);
    for (unsigned stage = first; stage < early; stage += STRIDE) {
        unsigned head_bytes = 0;
        if (OVERLAPS && stage == 0) {
            head_bytes = write_head(p, memory, found.tile, is_placed ? rows_of(p, found.tile) : found.rows, 0);
        }
        copy_weights(p, memory, found.tile, stage, stage, head_bytes);
        if (ACTIVATES && stage == 0) {
            // The last kernel did not write router weights either.
            copy_head(p, memory, found.tile, 0, memory.start + memory.full_at);
        }
    }
    wait_for_last_kernel();
    Place base;
    unsigned count = 0;
    [[maybe_unused]] unsigned head = 0;
    for_each_tile(p, [&](const Tile &tile) {
        const unsigned own = (first - count) % STRIDE;
        Place place = base.after(own, p.stages);
        for (unsigned stage = own; stage < padded; stage += STRIDE) {
            const unsigned full = memory.start + memory.full_at + place.slot * 8;
            if (stage >= early) {
                barrier_wait(memory.start + memory.empty_at + place.slot * 8, place.phase ^ 1);
            }
            if (PAIR == 1 || stage < k_stages) {
                if (stage >= early) {
                    const unsigned head_bytes = OVERLAPS && stage == 0 ? write_head(p, memory, tile, rows_of(p, tile), head) : 0;
                    copy_weights(p, memory, tile, stage, place.slot, head_bytes);
                }
                if (OVERLAPS && IS_MOE && stage == 0 && (!ACTIVATES || early == 0)) {
                    copy_head(p, memory, tile, head, full);
                }
                if constexpr (!ACTIVATES) {
                    copy_box(memory.start + place.slot * X_BYTES, x_map, stage * STAGE_K, tile.row, full);
                }
            } else {
                // The last pair has one stage: the other one's slot stays as it is.
                barrier_arrive(full);
            }
            place = place.after(STRIDE, p.stages);
        }
        early = 0;
        count += padded;
        const unsigned end = base.slot + padded;
        base = {end % p.stages, base.phase ^ (end / p.stages & 1)};
        if constexpr (OVERLAPS) {
            head = next_head(p, head);
        }
    });
    if constexpr (OVERLAPS) {
        if (first == count % STRIDE) {
            // No tile follows.
            barrier_wait(memory.start + memory.empty_at + base.slot * 8, base.phase ^ 1);
            write_head(p, memory, {0, 0, -1}, 0, head);
            barrier_arrive(memory.start + memory.full_at + base.slot * 8);
        }
    }
}
